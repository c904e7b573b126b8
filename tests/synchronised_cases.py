"""``nn.SyncBatchNorm`` on CPUs, in processes of one group: torch has its operations for GPUs alone.

Here they are in plain torch, so that torch's own norm can be run, and compiled, where there is no GPU.
"""

import torch
from torch import distributed, library, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F

import torch_dcl as dcl


def _sides(x):
    return (1, -1, *(1,) * (x.dim() - 2))


def _others(x):
    return [d for d in range(x.dim()) if d != 1]


def _stats(x, eps):
    variance, mean = torch.var_mean(x, _others(x), unbiased=False)
    return mean, (variance + eps).rsqrt()


def _gather(x, means, rstds, running_mean, running_var, momentum, eps, counts):
    total, share = counts.sum(), (counts / counts.sum())[:, None]
    mean = (means * share).sum(0)
    variance = ((rstds**-2 - eps + (means - mean) ** 2) * share).sum(0)
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(variance * total / (total - 1), momentum)
    return mean, (variance + eps).rsqrt()


def _apply(x, gamma, beta, mean, rstd, eps):
    mean, rstd, gamma, beta = (t.view(_sides(x)) for t in (mean, rstd, gamma, beta))
    return (x - mean) * rstd * gamma + beta


def _reduce(grad, x, mean, rstd, gamma, *wanted):
    beta, apart = grad.sum(_others(x)), (grad * (x - mean.view(_sides(x)))).sum(_others(x))
    return beta, apart, apart * rstd, beta.clone()


def _differentiate(grad, x, mean, rstd, gamma, sums, apart, counts):
    mean, rstd, gamma, sums, apart = (t.view(_sides(x)) for t in (mean, rstd, gamma, sums, apart))
    count = counts.sum()
    return (grad - sums / count - (x - mean) * rstd**2 * apart / count) * rstd * gamma


def on_cpus():
    """Let torch's norm run on the CPUs of this process; what it returns keeps it so."""
    forward = nn.SyncBatchNorm.forward
    kinds = tuple("cpu" if constant == "cuda" else constant for constant in forward.__code__.co_consts)
    assert "cpu" in kinds, "torch names the devices of its norm in another way"
    forward.__code__ = forward.__code__.replace(co_consts=kinds)
    operations = library.Library("aten", "IMPL")
    for name, function in (
        ("stats", _stats), ("gather_stats_with_counts", _gather), ("elemt", _apply), ("backward_reduce", _reduce),
        ("backward_elemt", _differentiate),
    ):  # fmt: skip
        operations.impl(f"batch_norm_{name}", function, "CPU")
    return operations


class Network(nn.Module):
    """Two units with operations between, so that a graph that breaks at both norms has three parts."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(6, 32, 3, bias=False), nn.BatchNorm2d(32)
        self.conv2, self.norm2 = nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x.sin())))
        x = F.relu(self.norm2(self.conv2(x.cos())))
        return self.head(x.mean((2, 3)).tanh())


class Graphs:
    """A backend that counts the graphs that run."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        compiled = aot_eager(graph, inputs)

        def run(*given):
            self.count += 1
            return compiled(*given)

        return run


def make(name, group):
    torch.manual_seed(0)
    network = Network()
    if name == "dcl":
        dcl.convert_(network, dcl.plan(network, (6, 7, 7)), init="random")
    return nn.SyncBatchNorm.convert_sync_batchnorm(network, group)


def case(name, group, training):
    """The graphs that a compiled network runs in a call, and how far it is from the same one without a compiler."""
    torch.compiler.reset()
    graphs, (plain, network) = Graphs(), (make(name, group).train(training) for _ in range(2))
    compiled = torch.compile(network, backend=graphs)
    apart = []
    for seed in range(3):
        graphs.count = 0
        torch.manual_seed(10 * seed + (distributed.get_rank() if distributed.is_initialized() else 0))
        x = torch.randn(4 + seed, 6, 7, 7)
        expected, found = plain(x), compiled(x)
        apart.append((expected - found).abs().max().item())
        if training:
            for z in (expected, found):
                z.square().sum().backward()
            pairs = zip(plain.parameters(), network.parameters(), strict=True)
            apart += [(mine.grad - own.grad).abs().max().item() for mine, own in pairs]
        pairs = zip(plain.buffers(), network.buffers(), strict=True)
        apart += [(mine - own).abs().max().item() for mine, own in pairs]
    return graphs.count, max(apart)


def run(rank, folder, world, own_group):
    """Both networks in both phases: what `case` returns; a world of 0 is a process without others."""
    torch.set_num_threads(1)
    kept = on_cpus()
    if world:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = {}
    try:
        group = distributed.new_group(list(range(world))) if own_group else None
        for name in ("plain", "dcl"):
            found |= {f"{name}, {training}": case(name, group, training) for training in (True, False)}
    finally:
        if world:
            distributed.destroy_process_group()
        del kept
    torch.save(found, f"{folder}/{rank}.pt")
