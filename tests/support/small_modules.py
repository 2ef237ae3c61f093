"""Modules of a few lines, each with one feature that a primitive handles, and the schedule of each."""

import torch
from torch import nn
from torch.nn import functional


class Fusable(nn.Module):
    """Module that in training passes its children's weights to one function, without calling the children."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)

    def forward(self, x):
        if self.training:
            up = functional.linear(x, self.up.weight, self.up.bias)
            return functional.linear(up.tanh(), self.down.weight)
        return self.down(self.up(x).tanh())


class Biased(nn.Module):
    """Head that adds its own bias to the output of its child."""

    def __init__(self):
        super().__init__()
        self.decoder, self.bias = nn.Linear(6, 9, bias=False), nn.Parameter(torch.randn(9))

    def forward(self, x):
        return self.decoder(x.tanh()) + self.bias


class Sloped(nn.Module):
    """Module that passes a number for each row and column to its child as an argument."""

    def __init__(self):
        super().__init__()
        self.slopes, self.inner = nn.Parameter(torch.randn(8)), Inner()

    def forward(self, x):
        return self.inner(x, slopes=(x.sum(-1, keepdim=True) * self.slopes).flatten())


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)

    def forward(self, x, slopes):
        return self.down(self.up(x).tanh() * slopes.view(len(x), -1))


class Multi(nn.Module):
    """Attention with one fused projection: four heads of two queries, and one key and value for all."""

    def __init__(self):
        super().__init__()
        self.qkv, self.down = nn.Linear(6, 8 + 4), nn.Linear(8, 6, bias=False)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (-1, 2))
        q, k, v = qkv[:, :-2], qkv[:, -2:-1], qkv[:, -1:]
        return self.down(((q * k).sum(-1, keepdim=True).tanh() * v).flatten(1))


class Normed(nn.Module):
    """Norm over all columns between two linears."""

    def __init__(self, norm=None):
        super().__init__()
        self.norm = (norm or SquareNorm)(8)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)

    def forward(self, x):
        return self.down(self.norm(self.up(x)).tanh())


class SquareNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(size)), 1e-6

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def fusable(sch):
    sch["1.up"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
    sch["1.down"].shard("weight", 1).sync("fwd_post", "all_reduce")
    sch["1"].unfused()


def biased(sch):
    sch["1"].shard("bias", 0, pad=True).vocab_bias("decoder")
    sch["1.decoder"].shard("weight", 0, pad=True)
    sch["1.decoder"].sync("bwd_post", "all_reduce").sync("fwd_post", "vocab_logits")


def normed(sch):
    sch["1"].sync("bwd_post", "all_reduce")
    sch["1.up"].shard("weight", 0).shard("bias", 0)
    sch["1.norm"].shard("weight", 0).sync_rms_norm("eps")
    sch["1.down"].shard("weight", 1).sync("fwd_post", "all_reduce")


def multi(sch):
    sch["1"].sync("bwd_post", "all_reduce")
    sch["1.qkv"].shard("weight", 0, unit=2, shared=4).shard("bias", 0, unit=2, shared=4)
    sch["1.down"].shard("weight", 1, unit=2).sync("fwd_post", "all_reduce")


def sloped(sch):
    sch["1.inner"].sync("bwd_post", "all_reduce").shard_argument("slopes", 8)
    sch["1.inner.up"].shard("weight", 0).shard("bias", 0)
    sch["1.inner.down"].shard("weight", 1).sync("fwd_post", "all_reduce")
