"""Decoders of many families, of two layers with random weights."""

import functools
import random

SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}

FAMILIES = {
    "llama": {},
    "llama-multi-head": {"num_key_value_heads": 4},
    "llama-multi-query": {"num_key_value_heads": 1},
    "mistral": {"sliding_window": None},
    "mistral-window": {"sliding_window": 24},
    "ministral": {"sliding_window": 24, "head_dim": 16},
    "qwen2": {},
    "qwen2-window": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 24},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, **MIXED},
    "phi": {},
    "phi3": {},
    "gpt2": GPT,
    "gpt_neox": {},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "gptj": {**GPT, "rotary_dim": 16},
    "gpt_bigcode": GPT,
    "codegen": {**GPT, "rotary_dim": 16},
    "olmo2": {},
    "olmo3": MIXED,
    "granite": {},
    "starcoder2": {"sliding_window": None},
    "cohere": {},
    "cohere2": MIXED,
    "smollm3": {},
    "glm4": {"head_dim": 16},
    "exaone4": MIXED,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, **EXPERTS},
    "deepseek_v3": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, **EXPERTS, **MLA},
}
"""What can be paged: a model type, and after a hyphen which of its kinds."""

REFUSED = {
    "gemma2": {"head_dim": 16},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    "falcon": {"new_decoder_architecture": False, "multi_query": False},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2},
    "stablelm": {},
    "mamba": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
"""What cannot."""


def decoder(name, seed=0, **config):
    """A float32 model of FAMILIES or REFUSED. Its weights are large enough for its answers to differ from token to token."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    family = name.split("-")[0]
    torch.manual_seed(seed)
    made = CONFIG_MAPPING[family](**{**SMALL, **{**FAMILIES, **REFUSED}[name], **config})
    model = AutoModelForCausalLM.from_config(made).eval().float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.15)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def requests(count=8, seed=1, longest=70, shared=20, most=24):
    """Prompts of 4 to `longest` tokens, every other one of which begins with the same `shared`; and how many tokens to generate."""
    choice = random.Random(seed)
    prefix = [choice.randint(3, 255) for _ in range(shared)]
    made = []
    for index in range(count):
        prompt = [choice.randint(3, 255) for _ in range(choice.randint(4, longest - shared))]
        made.append((prefix + prompt if index % 2 else prompt, choice.randint(4, most)))
    return made


def alone(model, prompt, max_tokens):
    """What transformers generates from it, greedily."""
    import torch

    ids = torch.tensor([prompt])
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)[0, len(prompt) :].tolist()


@functools.lru_cache(maxsize=4)
def answers(name, **config):
    """What a family's model answers to `requests()`, one by one."""
    model = decoder(name, **config)
    return [alone(model, prompt, max_tokens) for prompt, max_tokens in requests()]
