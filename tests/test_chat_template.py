"""Messages become a prompt as transformers makes it of them, and a template gets at nothing else."""

import json
import os

import pytest

import gpuworker
from tests.byte_tokenizer import byte_fallback
from tests.fake_generation import TEMPLATE, client_fixture, directory_fixture, owner_fixture  # noqa: F401

MESSAGES = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hi 中\U0001f389"}]


def test_messages_go_through_the_template_as_in_transformers(owner, client, directory):
    transformers = pytest.importorskip("transformers")
    stream = client.stream(MESSAGES, max_tokens=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert owner.admit_one().request.ids == list(expected)
    stream.close()


def test_a_template_brings_its_own_beginning_and_a_text_does_not(owner, client, directory):
    """A tokenizer that puts <s> in front of a text is not to put another one in front of the template's."""
    byte_fallback().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text("<s>{{ messages[0].content }}")
    for prompt in ([{"role": "user", "content": "hello"}], "hello"):
        with client.stream(prompt, max_tokens=1):
            (answer,) = owner.admit()
            assert answer.request.ids.count(1) == 1
        answer.finish()


TEMPLATES = [
    TEMPLATE,
    "{%- for m in messages -%}\n{% generation %}{{ bos_token }}{{ m.content }}{% endgeneration %}\n"
    "{%- if loop.last %}{% break %}{% endif %}\n{%- endfor -%}{{ eos_token }}",
    "{% set ns = namespace(found=false) %}{% for m in messages %}{% set ns.found = true %}{% endfor %}{{ ns.found }}{{ messages | tojson }}{{ dict(a=1) }}",
    "{{ messages[0]['content'] | upper }}{{ tools is none }}{{ add_generation_prompt }}   \n  {% if true %}\n x{% endif %}\n",
    "{{ messages[1].get('name', 'none') }}<{{ messages | length }}>\u00e9",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("place", ["jinja", "config", "list"])
def test_templates_render_as_in_transformers(directory, template, place):
    transformers = pytest.importorskip("transformers")
    from gpuworker.client.chat import render

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
        "bos_token": "<|im_start|>",
    }
    if place == "config":
        config["chat_template"] = template
    elif place == "list":
        config["chat_template"] = [{"name": "other", "template": "no"}, {"name": "default", "template": template}]
    else:
        config["chat_template"] = "not this one"
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [*MESSAGES, {"role": "assistant", "content": "x", "name": None}]
    expected = transformers.AutoTokenizer.from_pretrained(directory).apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert render(str(directory), messages) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content / 2 }}",
        "{{ messages.append(1) }}",
        "{{ ().__class__.__bases__ }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ namespace(__init__=1) }}",
        "{{ dict.fromkeys.__globals__ }}",
        "{{ ''['format'].__globals__['x'] }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_templates_that_refuse_or_want_out(directory, client, owner, template):
    (directory / "chat_template.jinja").write_text(template)
    with pytest.raises(gpuworker.InvalidRequest, match="chat template does not take"):
        client.generate(MESSAGES)
    assert owner.in_use == 0


def test_messages_that_are_none(directory, client):
    for messages in ([{"content": "x"}], [{"role": "user", "content": "x"}, "y"], [{"role": 3}]):
        with pytest.raises(gpuworker.InvalidRequest, match="messages: give dicts like"):
            client.generate(messages)
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(gpuworker.InvalidRequest, match="has no chat template"):
        client.generate(MESSAGES)
    (directory / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(gpuworker.GpuWorkerError, match="cannot be read"):
        client.generate(MESSAGES)
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(gpuworker.GpuWorkerError, match="is no chat template"):
        client.generate(MESSAGES)


@pytest.mark.parametrize("file", ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json"])
def test_files_that_never_end_are_not_waited_for(directory, client, file):
    """Any frontend can write into the worker's info where the model is."""
    (directory / file).unlink(missing_ok=True)
    os.mkfifo(directory / file)
    with pytest.raises(gpuworker.GpuWorkerError, match="not a regular file"):
        client.generate(MESSAGES)
