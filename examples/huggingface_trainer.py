"""K-FAC under the Trainer of Hugging Face, on a small language model that learns to count.

    python examples/huggingface_trainer.py [--steps 100]

The only line that differs from training without K-FAC is `optimizer_cls_and_kwargs=...`.
"""

import argparse
import tempfile

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from kronfac.huggingface import optimizer_cls_and_kwargs

VOCABULARY, TOKENS = 32, 16


def sentences(number: int) -> list[dict[str, Tensor]]:
    """Counting by one to five from anywhere, modulo the vocabulary."""
    starts, strides = torch.randint(VOCABULARY, (number, 1)), torch.randint(1, 6, (number, 1))
    words = (starts + strides * torch.arange(TOKENS)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in words]


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    set_seed(0)
    model = make_model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            weight_decay=0.01,
            warmup_steps=5,
            logging_steps=max(1, steps // 10),
            logging_first_step=True,
            save_strategy="no",
            report_to=[],
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=sentences(2048),
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(model, lr=0.1),
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(trainer.optimizer.optimizer)
    print(f"loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}")


if __name__ == "__main__":
    main()
