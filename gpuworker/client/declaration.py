"""What a worker has declared of its requests, for programs that translate other protocols into them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from gpuworker._native import lib
from gpuworker.client.contract import Contract, GenerationContract
from gpuworker.errors import InvalidRequest, WorkerNotFound
from gpuworker.segment import Segment, State
from gpuworker.segment.segment import state_name

if TYPE_CHECKING:
    from gpuworker.client.vocabulary import Vocabulary
    from gpuworker.tensors import TensorSpec

_NOTHING: Mapping[str, TensorSpec] = MappingProxyType({})


class Declaration:
    """Of one worker at one time.

    kind: "values": nothing is declared, requests and answers are whatever crosses; "tensors": arrays; "generation": for `generate` and `stream`.
    inputs, outputs: by name, of one request and one answer; where single_input (single_output) is true they are bare arrays, called "input" ("output") here.
    takes_text: a str is a request, too. max_model_tokens: of a prompt and its answer; 0 where the worker does not generate. directory: of the model, "" likewise.
    """

    def __init__(self, contract: Contract | GenerationContract | None) -> None:
        self.kind: Literal["values", "tensors", "generation"] = "values"
        self.inputs, self.outputs = _NOTHING, _NOTHING
        self.single_input = self.single_output = self.takes_text = False
        self.max_model_tokens, self.directory = 0, ""
        self._contract = contract
        if isinstance(contract, GenerationContract):
            self.kind, self.max_model_tokens, self.directory = "generation", contract.max_model_tokens, contract.directory
        elif contract is not None:
            signature = contract.signature
            self.kind, self.inputs, self.outputs = "tensors", MappingProxyType(signature.inputs), MappingProxyType(signature.outputs)
            self.single_input, self.single_output, self.takes_text = signature.single_input, signature.single_output, contract.takes_text

    def tokens_of(self, text: str) -> dict[str, Any]:
        """What a text becomes where takes_text is true: int64 arrays (tokens,) by name, a request. Raises as `Client.submit` does for a text."""
        if not isinstance(self._contract, Contract) or not self.takes_text:
            raise InvalidRequest("this worker takes no text")
        tokens: dict[str, Any] = self._contract.prepare(text)[0]
        return tokens

    def ids_of(self, prompt: Any) -> Any:
        """The token ids that `generate` would make of a str or of messages; for a prompt that is so long that it should not be done in an event loop. Raises as
        `Client.generate` does."""
        from gpuworker.client import chat

        if isinstance(prompt, str):
            return self._vocabulary().encode(prompt)
        return self._vocabulary().encode(chat.render(self.directory, prompt), add_special_tokens=False)  # the template has them

    def text_of(self, token: int) -> str:
        """A token of a worker that generates, by itself, special ones too. A part of a character is U+FFFD. Raises as `Client.generate` does for a text."""
        return self._vocabulary().text_of(token)

    def _vocabulary(self) -> Vocabulary:
        from gpuworker.client import vocabulary

        return vocabulary.load(self.directory)


class Declared:
    """What a worker declares, kept up to date: `declared.now()` costs less than a microsecond where nothing has changed. Opens nothing before that; fork-safe.

    name: the worker's.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._segment: Segment | None = None
        self._known: tuple[bytes, Declaration] = (b"", Declaration(None))

    def now(self) -> Declaration:
        """As the worker says it at this moment. Raises WorkerNotFound where there is none that is ready, SegmentError."""
        segment = self._segment
        known, declaration = self._known
        if segment is not None and lib.gw_says(segment.port, known, len(known)):
            return declaration
        state = State.STOPPED if segment is None else segment.overview().state
        if segment is None or state >= State.STOPPED:
            segment = self._segment = Segment.attach(self.name, read_only=True)
            state = segment.overview().state
        if state == State.STARTING:  # it has not said anything yet
            raise WorkerNotFound(f"worker {self.name!r} is {state_name(state)}")
        info = segment.info()
        if info != known:
            declaration = Declaration(Contract.parse(info))
            self._known = info, declaration
        return declaration
