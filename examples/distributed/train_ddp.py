"""K-FAC on several ranks, with checkpoints from which any number of ranks can go on.

    torchrun --nproc-per-node 2 examples/distributed/train_ddp.py [--checkpoint DIR]

The loop is that of one process; K-FAC is the line in `make_optimizer`. Gloo on CPUs, NCCL on GPUs. Each
batch is divided over the ranks, so that their number changes the speed and not the result. With
`--checkpoint` the state is saved after every epoch, and a run that finds checkpoints goes on from the
newest whole one. So this survives the loss of a rank:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --max-restarts 3 \\
        --nproc-per-node 2 examples/distributed/train_ddp.py --checkpoint DIR

(why the variable: docs/distributed.md, "Faults"). `slurm.sbatch` starts the same script on several hosts.
"""

import argparse
import os
import shutil
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import kronfac

#: Samples of one step, on all ranks together.
BATCH = 96
#: Samples that are left for testing.
TEST = 360


def make_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


def make_optimizer(model: nn.Module, distribute: str | kronfac.Hybrid) -> kronfac.KFAC:
    return kronfac.KFAC(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        momentum=0.9,
        nesterov=True,
        factor_every=5,
        refresh_every=20,
        distribute=distribute,
    )


def scheme(text: str) -> str | kronfac.Hybrid:
    """A name, or a number for `kronfac.Hybrid`."""
    try:
        return kronfac.Hybrid(float(text))
    except ValueError:
        return text


def start() -> torch.device:
    """Join the other ranks. A message that takes longer than the timeout is an error, not a hang."""
    timeout = timedelta(minutes=5)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout)
        return device
    dist.init_process_group("gloo", timeout=timeout)
    return torch.device("cpu")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


# --- data ------------------------------------------------------------------------------------


def load_data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return TensorDataset(images[TEST:], labels[TEST:]), TensorDataset(images[:TEST], labels[:TEST])


def measure_accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Every rank tests its share."""
    images, labels = (part[dist.get_rank() :: dist.get_world_size()] for part in data.tensors)
    model.eval()
    with torch.no_grad():
        right = (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    model.train()
    dist.all_reduce(right)
    return int(right) / len(data)


# --- checkpoints -----------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Path]:
    """Whole ones, oldest first: the metadata is written when every rank has written its part."""
    return sorted(one.parent for one in folder.glob("epoch-*/.metadata"))


def save(folder: Path, epoch: int, model: nn.Module, optimizer: kronfac.KFAC) -> None:
    optimizer.consolidate()  # what ranks have observed since the last refresh is added up
    weights, state = get_state_dict(model, optimizer)
    content = {"model": weights, "optimizer": state, "epoch": epoch}
    dcp.save(content, checkpoint_id=folder / f"epoch-{epoch:04d}")
    if dist.get_rank() == 0:
        for old in checkpoints(folder)[:-2]:
            shutil.rmtree(old)


def resume(folder: Path, model: nn.Module, optimizer: kronfac.KFAC) -> int:
    """Load the newest checkpoint, whatever number of ranks has saved it; returns its epoch."""
    found = [str(one) for one in checkpoints(folder)[-1:]]
    dist.broadcast_object_list(newest := [found], src=0)  # files may not be seen everywhere at once
    if not newest[0]:
        return 0
    weights, state = get_state_dict(model, optimizer)
    content = {"model": weights, "optimizer": state, "epoch": 0}
    dcp.load(content, checkpoint_id=newest[0][0])
    set_state_dict(
        model,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )
    say(f"resumed after epoch {content['epoch']}")
    return content["epoch"]


# --- training --------------------------------------------------------------------------------


def train_epoch(
    model: nn.Module, optimizer: kronfac.KFAC, batches: DataLoader, device: torch.device
) -> None:
    x: Tensor
    y: Tensor
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()


@record  # torchrun then shows the traceback of the rank that failed first
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--distribute",
        type=scheme,
        default="auto",
        help="a scheme by name, or a number in (0, 1] for Hybrid",
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path, help="folder to save to and to resume from")
    arguments = parser.parse_args()
    device = start()
    ranks = dist.get_world_size()
    if BATCH % ranks:
        raise SystemExit(f"{BATCH} samples cannot be divided evenly over {ranks} ranks.")
    torch.manual_seed(0)
    model = DistributedDataParallel(make_network().to(device))
    optimizer = make_optimizer(model, arguments.distribute)
    placement = optimizer.placement
    say(f"{ranks} ranks, scheme {placement.scheme if placement else 'of one process'}")
    data, test = load_data()
    sampler = DistributedSampler(data, drop_last=True)
    batches = DataLoader(data, BATCH // ranks, sampler=sampler, drop_last=True)
    first = resume(arguments.checkpoint, model, optimizer) if arguments.checkpoint else 0
    for epoch in range(first, arguments.epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, optimizer, batches, device)
        accuracy = measure_accuracy(model, test, device)
        carried = {name: size for name, size in optimizer.stats()["bytes"].items() if size}
        sizes = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in carried.items())
        say(f"epoch {epoch + 1}: accuracy {accuracy:.1%}; K-FAC has sent: {sizes or 'nothing'}")
        if arguments.checkpoint:
            save(arguments.checkpoint, epoch + 1, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
