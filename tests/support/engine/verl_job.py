"""verl's default trainer over a pool, run with verl on the path: `python verl_job.py SETTINGS`.

SETTINGS is a JSON file: the text of the page's YAML, and where this machine differs. verl prints its
metrics, a line for each step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas
import verl
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

MIB = 2**20
CONFIGS = Path(verl.__file__).parent / "trainer" / "config"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **more):
    return len(solution_str) % 7 / 7
"""


def written_prompts(folder: Path) -> str:
    """Write prompts as verl reads them and return the file."""
    questions = ["roll out the policy", "let me add", "hello you", "say it"]
    rows = [
        {
            "data_source": "length",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, question in enumerate(questions)
    ]
    file = folder / "prompts.parquet"
    pandas.DataFrame(rows).to_parquet(file)
    return str(file)


def machine_settings(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what a tiny model, one process and no accelerator need."""
    (folder / "reward.py").write_text(REWARD)
    prompts = written_prompts(folder)
    batches = {"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 1}
    return {
        "data": {
            "train_files": prompts,
            "val_files": prompts,
            "train_batch_size": 2,
            "max_prompt_length": 64,
            "max_response_length": 8,
            "dataloader_num_workers": 0,
        },
        "algorithm": {"adv_estimator": "grpo"},
        "reward": {
            "custom_reward_function": {"path": str(folder / "reward.py")},
            "num_workers": 1,
        },
        "actor_rollout_ref": {
            "model": {
                "path": settings["model"],
                "use_remove_padding": False,
                "override_config": {"attn_implementation": "eager"},
            },
            # Steps so large that tokens of the weights before would be noticed.
            "actor": {**batches, "use_torch_compile": False, "optim": {"lr": 0.01}},
            "rollout": {
                "n": 2,
                "tensor_model_parallel_size": 1,
                "agent": {"num_workers": 1},
                "log_prob_micro_batch_size_per_gpu": 1,
                **settings["rollout"],
            },
        },
        "trainer": {
            "device": "cpu",
            "n_gpus_per_node": 1,
            "nnodes": 1,
            "logger": ["console"],
            "total_training_steps": settings["steps"],
            "save_freq": -1,
            "test_freq": -1,
            "val_before_train": False,
            "default_local_dir": str(folder / "checkpoints"),
        },
        "transfer_queue": {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}},
        "ray_kwargs": {
            "ray_init": {
                # verl's actors reserve processors and an accelerator, and share what there is.
                "num_cpus": 16,
                "num_gpus": 1,
                "include_dashboard": False,
                "object_store_memory": 80 * MIB,
            }
        },
    }


def configured(settings: dict[str, Any], folder: Path) -> Any:
    """Return verl's own configuration with the page's changes, on this machine."""
    with initialize_config_dir(str(CONFIGS), version_base=None):
        config = compose("ppo_trainer")
    OmegaConf.set_struct(config, False)
    page = yaml.safe_load(settings["yaml"])
    page["actor_rollout_ref"]["rollout"]["custom"]["pool"] = settings["pool"]
    return OmegaConf.merge(config, page, machine_settings(settings, folder))


def main(path: str) -> None:
    file = Path(path)
    run_ppo(configured(json.loads(file.read_text()), file.parent), TaskRunnerV1)


if __name__ == "__main__":
    main(sys.argv[1])
