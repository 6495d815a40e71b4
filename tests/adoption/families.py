"""Small models of every family of causal language models that transformers can build from a configuration."""

import dataclasses
import inspect
import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # some configurations load others; tests must not download

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 128
LARGEST = 20_000_000

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 32,
    # attention with compressed keys and values
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "global_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "attention_window_size": 16,
    "sliding_window": 16,
    # state space models and linear attention
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 128,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "state_size": 8,
    "num_heads": 8,
    "expand": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "lru_width": 64,
    # synonyms of names above
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "d_model": 64,
    "d_ff": 96,
    "d_kv": 16,
    "num_layers": 2,
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 64,
}


class CannotBuild(Exception):  # noqa: N818
    pass


def build(family: str) -> nn.Module:
    """Builds a model with random weights in float32.

    Raises:
        CannotBuild: transformers rejects such a small configuration.
    """
    config_class = CONFIG_MAPPING[family]
    try:
        names = {field.name for field in dataclasses.fields(config_class)}
    except TypeError:
        names = set(inspect.signature(config_class.__init__).parameters)
    try:
        config = config_class(**{name: size for name, size in SIZES.items() if name in names})
        with torch.device("meta"):
            size = AutoModelForCausalLM.from_config(config).num_parameters()
        if size > LARGEST:
            raise CannotBuild(f"{size} parameters, its sizes have other names")
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).float().eval()
    except CannotBuild:
        raise
    except Exception as error:  # transformers raises many types
        raise CannotBuild(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}") from error
