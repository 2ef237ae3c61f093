"""Modules of a few lines, each with one habit that a primitive is made for."""

import torch
from torch import nn
from torch.nn import functional


class Fusable(nn.Module):
    """In training it hands the weights of its children to one function, past their hooks."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)

    def forward(self, x):
        if self.training:
            up = functional.linear(x, self.up.weight, self.up.bias)
            return functional.linear(up.tanh(), self.down.weight)
        return self.down(self.up(x).tanh())


class Biased(nn.Module):
    """A head that adds a bias of its own to what its child makes."""

    def __init__(self):
        super().__init__()
        self.decoder, self.bias = nn.Linear(6, 9, bias=False), nn.Parameter(torch.randn(9))

    def forward(self, x):
        return self.decoder(x.tanh()) + self.bias


class Sloped(nn.Module):
    """It makes a number for each row and column of its child, which passes as an argument."""

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
