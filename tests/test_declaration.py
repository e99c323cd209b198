"""What a worker declares, as other programs read it."""

import os

import pytest

import gpuworker
from gpuworker import Declared
from tests.tensor_handlers import Doubled, Summed


def test_of_a_worker_that_declares_nothing(in_process):
    worker = in_process(lambda requests: requests)
    declaration = Declared(worker.name).now()
    assert (declaration.kind, dict(declaration.inputs), declaration.takes_text, declaration.max_model_tokens) == ("values", {}, False, 0)
    with pytest.raises(gpuworker.InvalidRequest, match="takes no text"):
        declaration.tokens_of("a")


def test_of_tensors(in_process):
    declaration = Declared(in_process(Summed()).name).now()
    assert declaration.kind == "tensors"
    assert list(declaration.inputs) == ["x", "scale"]
    assert list(declaration.outputs) == ["y", "sum"]
    assert not declaration.single_input
    bare = Declared(in_process(Doubled()).name).now()
    assert (bare.single_input, bare.single_output, list(bare.inputs), list(bare.outputs)) == (True, True, ["input"], ["output"])


def test_it_is_what_the_worker_says_now(name):
    declared = Declared(name)
    with pytest.raises(gpuworker.WorkerNotFound):
        declared.now()
    for handler, kind in ((lambda requests: requests, "values"), (Doubled(), "tensors"), (lambda requests: requests, "values")):
        with gpuworker.Worker(handler, name=name, in_process=True):
            assert declared.now().kind == kind
            assert declared.now() is declared.now()  # nothing is parsed twice
        with pytest.raises(gpuworker.WorkerNotFound):
            declared.now()


def test_a_child_reads_it_too(in_process):
    declared = Declared(in_process(Doubled()).name)
    declared.now()
    child = os.fork()
    if not child:
        os._exit(0 if declared.now().kind == "tensors" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
