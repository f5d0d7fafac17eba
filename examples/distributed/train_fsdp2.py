"""K-FAC on a sharded model, in the order in which torchtitan builds its models.

    torchrun --nproc-per-node 2 examples/distributed/train_fsdp2.py [--checkpoint DIR] [--replicas 1]

meta device -> compile each block -> fully_shard each block -> to_empty -> initialise -> optimizer. The
optimizer is made by a factory from parameter groups. The loss is the sum over tokens divided by those of
all ranks, and FSDP2 adds gradients up. Checkpoints are flat and load on any number of ranks. Gloo on
CPUs, NCCL on GPUs.
"""

import argparse
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule, fully_shard

import kronfac

WORDS, WIDTH, LENGTH, BATCH = 32, 48, 16, 32
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Block(nn.Module):
    """Pre-norm attention and a gated MLP, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (
            one(y).unflatten(-1, (4, -1)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Tokens to scores of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def init_weights(self) -> None:
        torch.manual_seed(0)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.1)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)


def make_model(device: str, replicas: int, compiles: bool) -> Decoder:
    with torch.device("meta"):
        model = Decoder()
    size = dist.get_world_size()
    shape = (size,) if replicas == 1 else (replicas, size // replicas)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    for block in model.blocks:
        if compiles:
            block.compile(backend="aot_eager" if device == "cpu" else "inductor", fullgraph=True)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is divided by the tokens of all ranks
            module.set_force_sum_reduction_for_comms(device == "cpu")  # Gloo cannot scale and add
    model.to_empty(device=device)
    model.init_weights()
    return model


def make_optimizer(model: nn.Module, groups: list[dict], lr: float) -> kronfac.KFAC:
    """The factory: any base optimizer, from parameter groups."""
    base = torch.optim.SGD(groups, lr=lr)
    return kronfac.KFAC(
        model,
        base,
        momentum=0.9,
        nesterov=True,
        factor_every=2,
        refresh_every=10,
        loss_average="token",
        max_grad_norm=1.0,
    )


def batch_of(step: int, device: str) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch: a counting game with two possible strides."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(WORDS, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 3, (BATCH, 1), generator=generator)
    tokens = ((start + stride * torch.arange(LENGTH + 1)) % WORDS).to(device)
    own = tokens.tensor_split(dist.get_world_size())[dist.get_rank()]
    return own[:, :-1], own[:, 1:]


def save(model: nn.Module, optimizer: kronfac.KFAC, step: int, folder: Path) -> None:
    optimizer.consolidate()
    state = {
        "step": step,
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }
    dcp.save(state, checkpoint_id=folder)


def load(model: nn.Module, optimizer: kronfac.KFAC, folder: Path) -> int:
    state = {
        "step": 0,
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)
    return state["step"]


@record
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--replicas", type=int, default=1, help="groups of ranks with all shards")
    parser.add_argument("--checkpoint", type=Path, help="folder to go on from, and to save to")
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    # What the compiler looks at while it traces hooks.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not", UserWarning)
    dist.init_process_group()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model = make_model(device, arguments.replicas, not arguments.no_compile)
    groups = [{"params": list(model.parameters()), "weight_decay": 0.01}]
    optimizer = make_optimizer(model, groups, arguments.lr)
    first = 0
    if arguments.checkpoint is not None and (arguments.checkpoint / ".metadata").exists():
        first = load(model, optimizer, arguments.checkpoint)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {len(optimizer.layers)} layers, step {first}")
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: max(0.0, 1 - (first + step) / arguments.steps)
    )
    for step in range(first, arguments.steps):
        x, y = batch_of(step, device)
        optimizer.zero_grad()
        total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        loss = total / (BATCH * LENGTH)  # tokens of all ranks
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 19:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if dist.get_rank() == 0:
                print(f"step {step + 1}: loss {shown.item():.3f}")
    if arguments.checkpoint is not None:
        save(model, optimizer, arguments.steps, arguments.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
