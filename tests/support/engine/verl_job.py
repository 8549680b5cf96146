"""A small verl job over a pool, run with verl on the path: `python verl_job.py SETTINGS`; prints JSON.

SETTINGS is a JSON file: the texts of the page's YAML and Python, and where this machine differs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray
import torch
import verl
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file

MIB = 2**20
CONFIGS = Path(verl.__file__).parent / "trainer" / "config"


def configured(settings: dict[str, Any]) -> Any:
    """Return verl's own configuration with the page's changes, on this machine."""
    with initialize_config_dir(str(CONFIGS), version_base=None):
        config = compose("ppo_trainer")
    OmegaConf.set_struct(config, False)
    page = yaml.safe_load(settings["yaml"])
    assert page["actor_rollout_ref"]["rollout"]["custom"]["pool"].keys() <= {
        *("name", "namespace", "folder", "mounted_at"),
    }
    page["actor_rollout_ref"]["rollout"]["custom"]["pool"] = settings["pool"]
    changes = {
        "model": {"path": settings["model"]},
        "rollout": {"agent": {"num_workers": 1}, **settings["rollout"]},
    }
    return OmegaConf.merge(config, page, {"actor_rollout_ref": changes})


def plain(value: Any) -> Any:
    """Return tensors and arrays as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def main(path: str) -> None:
    """Run it."""
    settings = json.loads(Path(path).read_text())
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True, object_store_memory=80 * MIB)
    torch.set_num_threads(1)
    names: dict[str, Any] = {
        "CONFIG": configured(settings),
        "TENSORS": load_file(settings["tensors"]),
        "QUESTIONS": settings["questions"],
    }
    exec(compile(settings["python"], "from-verl.md", "exec"), names)
    answers = names["answers"]
    said = {
        "batch": {name: plain(value) for name, value in answers.batch.items()},
        "facts": {
            name: [plain(each) for each in answers.non_tensor_batch[name]]
            for name in ("global_steps", "min_global_steps", "max_global_steps", "weights")
        },
        "timing": sorted(answers.meta_info["timing"]),
    }
    sys.stdout.write(json.dumps(said) + "\n")
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
