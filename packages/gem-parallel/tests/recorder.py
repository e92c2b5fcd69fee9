"""Counts what a rank passes to torch.distributed."""

import torch.distributed as dist

from gem_parallel._src.embeddings import link


class Recorder:
    """Counts what this rank passes to torch.distributed: (kind, bytes to other ranks, bytes received in all)."""

    # Two names each: torch 2.13 renamed them.
    KINDS = {  # noqa: RUF012
        "all_gather_into_tensor": "all_gather",
        "all_gather_single": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "reduce_scatter_single": "reduce_scatter",
        "all_reduce": "all_reduce",
        "all_to_all_single": "all_to_all",
    }

    def __enter__(self):
        self.calls = []
        # The tables' transfers know torch's all-gather by a name of their own.
        places = [(dist, name) for name in self.KINDS if hasattr(dist, name)] + [(link, "all_gather_single")]
        self.saved = [(place, name, getattr(place, name)) for place, name in places]
        for place, name, function in self.saved:
            setattr(place, name, self.wrap(name, function))
        return self

    def __exit__(self, *_):
        for place, name, function in self.saved:
            setattr(place, name, function)

    def wrap(self, name, original):
        kind = self.KINDS[name]

        def call(*args, **kwargs):
            bound = dict(zip(("output", "input", "output_split_sizes", "input_split_sizes"), args, strict=False))
            bound |= kwargs
            group = kwargs.get("group")
            size, rank = dist.get_world_size(group), dist.get_rank(group)
            given = kwargs.get("output_tensor", args[0] if args else kwargs.get("tensor", kwargs.get("output")))
            if kind == "all_gather":
                self.calls.append((kind, given.nbytes * (size - 1) // size, given.nbytes))
            elif kind == "reduce_scatter":
                self.calls.append((kind, given.nbytes * (size - 1), given.nbytes))
            elif kind == "all_reduce":
                self.calls.append((kind, 2 * given.nbytes * (size - 1) / size, given.nbytes))
            else:
                sent = bound["input"]
                splits = bound.get("input_split_sizes")
                row = sent[0].nbytes if sent.shape[0] else 0
                own = splits[rank] * row if splits else sent.nbytes // size
                self.calls.append((kind, sent.nbytes - own, bound["output"].nbytes))
            return original(*args, **kwargs)

        return call
