"""Trainers that save and resume sharded models, started by torchrun: they end where one process ends."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from trainers import OPTIONS, SAMPLES, STEPS, Classifier, alone, data, difference, make, net, part

SAVED_AT = 3  # of four steps: a refresh before it and none right after it


def force_fsdp2(accelerator: Any, plugin: Any) -> None:
    """Accelerate offers FSDP2 on accelerators only; what it does to a model is the same."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    # Whoever makes another AcceleratorState copies the type from there.
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def with_accelerate(folder: Path, kind: str = "SHARDED_STATE_DICT") -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState

    def prepared() -> Any:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            state_dict_type=kind,
        )
        accelerator = Accelerator(cpu=True)
        force_fsdp2(accelerator, plugin)
        model = net()
        return accelerator, *accelerator.prepare(model, make(model))

    def train(accelerator: Any, model: Any, optimizer: Any, steps: slice) -> None:
        for batch in data()[steps]:
            x, y = part(batch)
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    first = prepared()
    train(*first, slice(0, SAVED_AT))
    first[0].save_state(str(folder))
    second = prepared()
    second[0].load_state(str(folder))
    train(*second, slice(SAVED_AT, None))
    return second[1]


def with_accelerate_in_full(folder: Path) -> Any:
    """All on one rank: torch gathers shards, but not what each rank has to itself."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = with_accelerate(folder, "FULL_STATE_DICT")
    said = any("has no statistics of 2 layers of this rank" in str(one.message) for one in caught)
    assert said == (dist.get_rank() == 1), [str(one.message) for one in caught]
    assert all(bool(p.full_tensor().isfinite().all()) for p in model.parameters())
    return None


def with_trainer(folder: Path) -> Any:
    from accelerate import FullyShardedDataParallelPlugin
    from transformers import Trainer, TrainingArguments

    from kronfac.huggingface import optimizer_cls_and_kwargs

    class Sharding(Trainer):
        """Shards on a CPU, and takes the samples in their order."""

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            force_fsdp2(self.accelerator, plugin)
            self.is_fsdp_enabled = True

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    def made() -> Trainer:
        model = Classifier()
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=STEPS,
            per_device_train_batch_size=SAMPLES // int(os.environ["WORLD_SIZE"]),
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            save_strategy="steps",
            save_steps=SAVED_AT,
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            fsdp=True,
            fsdp_config={
                "fsdp_version": 2,
                "transformer_layer_cls_to_wrap": ["Block"],
                "state_dict_type": "SHARDED_STATE_DICT",
            },
        )
        pairs = [(x, y) for xs, ys in data() for x, y in zip(xs, ys, strict=True)]
        base: dict[str, Any] = {"lr": 0.05, "base_options": {"momentum": 0.9}}
        chosen = optimizer_cls_and_kwargs(
            model, torch.optim.SGD, loss_average="batch", **base, **OPTIONS
        )
        dataset = [{"x": x, "labels": y} for x, y in pairs]
        return Sharding(model, arguments, train_dataset=dataset, optimizer_cls_and_kwargs=chosen)

    made().train()
    resumed = made()
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED_AT}"))
    assert resumed.state.global_step == STEPS
    return resumed.model


def with_lightning(folder: Path) -> Any:
    import lightning as L
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            for block in (*self.net, self.net):
                fully_shard(block, mesh=mesh)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = part(data()[self.trainer.global_step])
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return make(self.net)

    def trainer(steps: int) -> L.Trainer:
        return L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
            max_steps=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            precision="32-true",
        )

    loader = torch.utils.data.DataLoader(torch.zeros(STEPS, 1))
    first = trainer(SAVED_AT)
    first.fit(Module(), loader)
    first.save_checkpoint(folder)
    module = Module()
    trainer(STEPS).fit(module, loader, ckpt_path=folder)
    return module.net


WITH = {
    "lightning": with_lightning,
    "accelerate": with_accelerate,
    "accelerate in full": with_accelerate_in_full,
    "trainer": with_trainer,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    model = WITH[sys.argv[1]](Path(sys.argv[2]))
    print(f"difference {0.0 if model is None else difference(model, alone()):.3g};", flush=True)
    dist.barrier()
    dist.destroy_process_group()
