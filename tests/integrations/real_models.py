"""Models that people train, small and on random weights, with a batch and the layers they have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from kronfac.train.models import CifarResNet

SAMPLES, TOKENS, VOCABULARY, CLASSES, BLOCKS = 4, 6, 13, 3, 2
#: The first two labels of each sentence are masked.
TERMS = SAMPLES * (TOKENS - 2)


@dataclass
class Case:
    """How to build a model and what becomes of its parameters."""

    make: Callable[[], nn.Module]
    data: Callable[[], dict[str, Tensor]]
    layers: list[str]
    average: str = "token"
    notes: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The same weights at each call, in training mode."""
        torch.manual_seed(0)
        return self.make().train().to(dtype)

    def batch(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The same at each call."""
        found = self.data()
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in found.items()}

    @property
    def terms(self) -> int:
        """What the loss is divided by."""
        return TERMS if self.average == "token" else SAMPLES


# --- batches ---------------------------------------------------------------------------------


def numbers() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def sentences() -> dict[str, Tensor]:
    words = torch.randint(1, VOCABULARY, (SAMPLES, TOKENS), generator=numbers())
    labels = words.clone()
    labels[:, :2] = -100
    return {"input_ids": words, "labels": labels}


def classes() -> Tensor:
    return torch.randint(CLASSES, (SAMPLES,), generator=numbers())


def labelled_sentences() -> dict[str, Tensor]:
    return {"input_ids": sentences()["input_ids"], "labels": classes()}


def pictures() -> dict[str, Tensor]:
    pixels = torch.randn(SAMPLES, 3, 8, 8, generator=numbers())
    return {"pixel_values": pixels, "labels": classes()}


# --- models ----------------------------------------------------------------------------------

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIZES = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
}


def bert_config(**options: Any) -> BertConfig:
    limits = {"vocab_size": VOCABULARY, "max_position_embeddings": 16}
    return BertConfig(**SIZES, **limits, **NO_DROPOUT, **options)


def gpt2() -> GPT2LMHeadModel:
    sizes = {"n_positions": 16, "n_embd": 8, "n_layer": BLOCKS, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes, **dropout)
    )


def llama() -> LlamaForCausalLM:
    sizes = SIZES | {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes))


def vit() -> ViTForImageClassification:
    pictures = {"image_size": 8, "patch_size": 4, "num_channels": 3}
    task = {"num_labels": CLASSES, "problem_type": "single_label_classification"}
    config = ViTConfig(**SIZES, **NO_DROPOUT, **pictures, **task)
    return ViTForImageClassification(config)


def t5() -> T5ForConditionalGeneration:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": BLOCKS, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    )


def opt() -> OPTForCausalLM:
    sizes = {"hidden_size": 8, "word_embed_proj_dim": 8, "ffn_dim": 12, "num_attention_heads": 2}
    limits = {"vocab_size": VOCABULARY, "max_position_embeddings": 16}
    return OPTForCausalLM(OPTConfig(num_hidden_layers=BLOCKS, dropout=0.0, **sizes, **limits))


class Classifier(nn.Module):
    """ResNet-20, called as the others are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = CifarResNet(20, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        return Output(nn.functional.cross_entropy(self.net(pixel_values), labels))


@dataclass
class Output:
    loss: Tensor


def blocks(prefix: str, *names: str) -> list[str]:
    return [f"{prefix}.{number}.{name}" for number in range(BLOCKS) for name in names]


SELF_ATTENTION = [f"attention.self.{name}" for name in ("query", "key", "value")]
BERT_BLOCK = [
    *SELF_ATTENTION,
    *("attention.output.dense", "attention.output.LayerNorm"),
    *("intermediate.dense", "output.dense", "output.LayerNorm"),
]
BERT_BODY = [
    "bert.embeddings.position_embeddings",
    "bert.embeddings.token_type_embeddings",
    "bert.embeddings.LayerNorm",
    *blocks("bert.encoder.layer", *BERT_BLOCK),
]
T5_SELF = [f"layer.0.SelfAttention.{name}" for name in "qkvo"]
T5_CROSS = [f"layer.1.EncDecAttention.{name}" for name in "qkvo"]
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def t5_layers() -> list[str]:
    """Blocks of encoder and decoder; positions are looked up in the first block of each."""
    found = []
    for side, last, more in (("encoder", 1, []), ("decoder", 2, T5_CROSS)):
        dense = [f"layer.{last}.DenseReluDense.{name}" for name in ("wi", "wo")]
        norms = [f"layer.{number}.layer_norm" for number in range(last + 1)]
        found += blocks(f"{side}.block", *T5_SELF, *more, *dense, *norms)
        found.append(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias")
        found.append(f"{side}.final_layer_norm")
    return found


CASES = {
    "bert-masked": Case(
        lambda: BertForMaskedLM(bert_config()),
        sentences,
        [
            *BERT_BODY,
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.decoder",
        ],
        notes={"cls.predictions.decoder": "also used as bert.embeddings.word_embeddings.weight"},
    ),
    "bert-classifier": Case(
        lambda: BertForSequenceClassification(bert_config(num_labels=CLASSES)),
        labelled_sentences,
        [*BERT_BODY, "bert.embeddings.word_embeddings", "bert.pooler.dense", "classifier"],
        average="batch",
    ),
    "gpt2": Case(
        gpt2,
        sentences,
        [
            "transformer.wpe",
            *blocks("transformer.h", "ln_1", "attn.c_attn", "attn.c_proj", "ln_2"),
            *blocks("transformer.h", "mlp.c_fc", "mlp.c_proj"),
            "transformer.ln_f",
            "lm_head",
        ],
        notes={"lm_head": "also used as transformer.wte.weight"},
    ),
    "llama": Case(
        llama,
        sentences,
        [
            "model.embed_tokens",
            *blocks("model.layers", *(f"self_attn.{name}" for name in (*PROJECTIONS, "o_proj"))),
            *blocks("model.layers", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
            *blocks("model.layers", "input_layernorm", "post_attention_layernorm"),
            "model.norm",
            "lm_head",
        ],
    ),
    "vit": Case(
        vit,
        pictures,
        [
            "vit.embeddings.patch_embeddings.projection",
            *blocks("vit.layers", *(f"attention.{name}" for name in (*PROJECTIONS, "o_proj"))),
            *blocks("vit.layers", "layernorm_before", "layernorm_after", "mlp.fc1", "mlp.fc2"),
            "vit.layernorm",
            "classifier",
        ],
        average="batch",
        left_out={
            "vit.embeddings.cls_token": "ViTEmbeddings is not a known layer type",
            "vit.embeddings.position_embeddings": "ViTEmbeddings is not a known layer type",
        },
    ),
    "t5": Case(
        t5,
        sentences,
        [*t5_layers(), "lm_head"],
        notes={"lm_head": "also used as shared.weight"},
    ),
    "opt": Case(
        opt,
        sentences,
        [
            *blocks("model.decoder.layers", *(f"self_attn.{name}" for name in PROJECTIONS)),
            *blocks("model.decoder.layers", "self_attn.out_proj", "self_attn_layer_norm"),
            *blocks("model.decoder.layers", "fc1", "fc2", "final_layer_norm"),
            "model.decoder.final_layer_norm",
            "lm_head",
        ],
        notes={"lm_head": "also used as model.decoder.embed_tokens.weight"}
        | dict.fromkeys(
            blocks("model.decoder.layers", "final_layer_norm"), "rows not grouped by sample"
        ),
        left_out={"model.decoder.embed_positions.weight": "it overrides Embedding.forward"},
    ),
    "resnet20": Case(
        Classifier,
        pictures,
        ["net.conv", "net.norm", "net.head"]
        + [
            f"net.stage{stage}.{number}.{name}"
            for stage in (1, 2, 3)
            for number in range(3)
            for name in ("conv1", "norm1", "conv2", "norm2")
        ],
        average="batch",
    ),
}
