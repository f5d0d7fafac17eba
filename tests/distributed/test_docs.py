"""The code on the page about several ranks runs, in its order, on ranks."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import kronfac
from kronfac.distributed.comm.traffic import TRAVELLING
from kronfac.placement.grid import nearest_divisor
from kronfac.placement.scheme import SCHEMES
from tests.distributed.equivalence import same_bits
from tests.distributed.models import KINDS
from tests.distributed.ranks import run
from tests.training import assert_same, parameters

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def code() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def carry_out(rank: int, folder: Path, blocks: list[str]) -> list[Any]:
    """Parameters and steps after each block; ranks have batches of their own, one of them fewer."""
    kind = KINDS["mlp"]
    names: dict[str, Any] = {
        "DistributedDataParallel": DistributedDataParallel,
        "Join": Join,
        "dcp": dcp,
        "device": torch.device("cpu"),
        "dist": dist,
        "folder": folder,
        "get_state_dict": get_state_dict,
        "kronfac": kronfac,
        "loader": [kind.batch(10 * rank + number, 4) for number in range(3)],
        "loss_fn": F.cross_entropy,
        "make_network": kind.model,
        "path": folder / "whole.pt",
        "set_state_dict": set_state_dict,
        "timedelta": timedelta,
        "torch": torch,
    }
    seen = []
    with mock.patch.object(dist, "init_process_group") as start:  # the ranks are there already
        for block in blocks:
            if "Join" in block and rank == 1:
                names["loader"].pop()
            exec(block, names)
            dist.barrier()
            model, optimizer = names["model"], names["optimizer"]
            assert same_bits(model)
            seen.append((parameters(model.module), optimizer.stats()["steps"]))
            if "loss_fn" not in block and "load" not in block:
                with torch.no_grad():  # what was saved comes back when it is loaded
                    for parameter in model.parameters():
                        parameter.zero_()
        start.assert_called_once()
    return seen


def test_the_blocks_run_one_after_the_other(tmp_path: Path) -> None:
    blocks = code()
    trained, saved, loaded, written, read, joined = run(2, carry_out, tmp_path, blocks)[0]
    assert "save" in blocks[1]
    assert "torch.save" in blocks[3]
    assert trained[1] == saved[1] == loaded[1] == written[1] == read[1] == 3
    assert_same(loaded[0], trained[0])
    assert_same(read[0], trained[0])
    assert joined[1] == 6


def test_the_page_names_every_scheme_switch_and_phase() -> None:
    text = PAGE.read_text()
    for name in SCHEMES:
        assert f'`"{name}"`' in text, name
    for name in kronfac.Distribute.__dataclass_fields__:
        assert f"`{name}`" in text or f"`{name}=" in text or name == "scheme", name
    for name in (*TRAVELLING, "refresh", "precondition"):
        assert f"*{name}*" in text, name


def test_the_ends_of_hybrid_are_what_the_page_says() -> None:
    for ranks in (2, 3, 4, 6, 8):
        assert nearest_divisor(ranks, 1.0) == ranks
        assert nearest_divisor(ranks, 1 / ranks) == 1
    assert nearest_divisor(6, 2.5 / 6) == 3  # as near to 2 as to 3
