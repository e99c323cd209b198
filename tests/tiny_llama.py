"""A small random llama in a directory, and what it generates when it is alone."""

import functools

import torch

VOCABULARY = 256
POISON = 7
"""A prompt with this token gives logits that are no numbers."""


def save(directory, positions=512):
    """Writes the model there. -> the directory, as text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=positions, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.15)
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = float("nan")
        model.lm_head.weight[POISON] = 0.0
    model.save_pretrained(directory)
    return str(directory)


@functools.cache
def _alone(directory):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def generated(directory, ids, count):
    """What the model says after these ids, by itself: greedily, without an end."""
    with torch.inference_mode():
        found = _alone(directory).generate(
            input_ids=torch.tensor([list(ids)]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=count, do_sample=False
        )
    return found[0, len(ids) :].tolist()
