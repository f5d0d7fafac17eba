"""Trainers on sharded models, started by torchrun: they end where one process ends."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import kronfac

STEPS, SAMPLES = 4, 12
OPTIONS: dict[str, Any] = {
    "damping": 0.01,
    "factor_every": 1,
    "refresh_every": 2,
    "rescale": "graft",
}


class Block(nn.Sequential):
    pass


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = Block(nn.Linear(5, 6), nn.Tanh()), Block(nn.Linear(6, 4), nn.Tanh()), nn.Linear(4, 3)
    return nn.Sequential(*layers).to(torch.float64)


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64),
            torch.randint(3, (SAMPLES,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def part(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    own = slice(None)
    if dist.is_initialized():
        size = SAMPLES // dist.get_world_size()
        own = slice(dist.get_rank() * size, dist.get_rank() * size + size)
    return batch[0][own], batch[1][own]


def make(model: nn.Module) -> Any:
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return kronfac.KFAC(model, base, **OPTIONS)


def alone() -> dict[str, Tensor]:
    model = net()
    optimizer = make(model)
    for x, y in data():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def difference(model: nn.Module, expected: dict[str, Tensor]) -> float:
    found = {}
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor), name
        plain = name.replace("_checkpoint_wrapped_module.", "").removeprefix("net.")
        found[plain] = p.full_tensor().detach()
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in found)


def with_lightning(expected: dict[str, Tensor]) -> float:
    import lightning as L
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Classifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            for block in self.net:
                fully_shard(block, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return make(self.net)

    class Batches(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return part(data()[index])

    module = Classifier()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        precision="32-true",
    )
    loader = torch.utils.data.DataLoader(Batches(), batch_size=None, shuffle=False)
    trainer.fit(module, loader)
    return difference(module.net, expected)


def with_accelerate(expected: dict[str, Tensor]) -> float:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        activation_checkpointing=True,
    )
    accelerator = Accelerator(cpu=True)
    # Accelerate offers FSDP2 on accelerators only; what it does to a model is the same.
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    model = net()
    optimizer = make(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in data():
        x, y = part(batch)
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return difference(model, expected)


class Classifier(nn.Module):
    """A model as Trainer wants it: it computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.net(x), labels)}


def with_trainer(expected: dict[str, Tensor]) -> float:
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType
    from transformers import Trainer, TrainingArguments

    from kronfac.huggingface import optimizer_cls_and_kwargs

    class Sharding(Trainer):
        """Shards on a CPU, and takes the samples in their order."""

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            # Accelerate offers FSDP2 on accelerators only; what it does to a model is the same.
            state = self.accelerator.state
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            state.distributed_type = DistributedType.FSDP
            self.is_fsdp_enabled = True

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    model = Classifier()
    arguments = TrainingArguments(
        output_dir="unused",
        max_steps=STEPS,
        per_device_train_batch_size=SAMPLES // int(os.environ["WORLD_SIZE"]),
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        fsdp=True,
        fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["Block"]},
    )
    base: dict[str, Any] = {"lr": 0.05, "base_options": {"momentum": 0.9}}
    trainer = Sharding(
        model,
        arguments,
        train_dataset=[
            {"x": x, "labels": y} for xs, ys in data() for x, y in zip(xs, ys, strict=True)
        ],
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(
            model, torch.optim.SGD, loss_average="batch", **base, **OPTIONS
        ),
    )
    trainer.train()
    return difference(trainer.model, expected)


WITH = {"lightning": with_lightning, "accelerate": with_accelerate, "trainer": with_trainer}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    wanted = alone()
    found = WITH[sys.argv[1]](wanted)
    print(f"difference {found:.3g};", flush=True)
    dist.barrier()
    dist.destroy_process_group()
