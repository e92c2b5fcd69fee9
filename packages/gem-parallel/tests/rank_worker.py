"""One rank of a test: run by conftest.run_ranks through runpy, with TASK in its globals."""

import importlib.util
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main(task):
    run = Path(task["run"])
    # Rank processes talk over the loopback device only.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            task["backend"],
            init_method=f"file://{run}/store",
            rank=task["rank"],
            world_size=task["world_size"],
            timeout=timedelta(seconds=120),
        )
        # Test files import their neighbours by name.
        sys.path.insert(0, str(Path(task["path"]).parent))
        spec = importlib.util.spec_from_file_location("rank_functions", task["path"])
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        function = getattr(module, task["function"])
        result = function(task["rank"], task["world_size"], Path(task["folder"]), **task["arguments"])
        torch.save(result, run / f"{task['rank']}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (run / f"{task['rank']}.error").write_text(traceback.format_exc())
        raise


main(TASK)  # noqa: F821
