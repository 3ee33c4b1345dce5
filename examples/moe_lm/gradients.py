"""How DDP adds the gradients of the ranks. Annotations are classes here, not strings: DDP checks those of its hook."""

import torch
import torch.distributed as dist

import transformer_plugin as tp


def average_in_rank_order(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean of the gradients of a bucket over the ranks of a group, added in ascending order of ranks.

    An all-reduce adds the ranks' values in an order that depends on their place in the bucket. DDP puts gradients into
    other buckets after the first backward of a process, so a resumed run would round otherwise than one that did not
    stop.
    """
    gradients = bucket.buffer()
    mean = tp.ops.all_reduce(gradients, group.size(), group.group_name) / group.size()
    future = torch.futures.Future(devices=[mean.device] if mean.is_cuda else [])
    future.set_result(mean)
    return future
