"""Device type of its own on a machine with only a CPU: its tensors hold real numbers.

    install(); with DeviceOnly() as watch: model.train_step(batch on DEVICE); watch.waits

Its tensors do not mix with CPU tensors, as those of a GPU do not. Within `DeviceOnly` process groups
serve this device only, as nccl does, and every operation for which the host would wait for the device
is counted with the line that asked for it.
"""

import sys
from collections import Counter
from functools import cache

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = "toy"
# The host may hand these a CPU tensor beside one of the device.
MIX = {
    "_copy_from",
    "_to_copy",
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "lift_fresh",
}
ASKS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim",
        "unique_consecutive", "is_nonzero"}  # fmt: skip
_WATCHES, _GLOO = [], set()


@cache
def install():
    """Register the device in torch, for the rest of this process."""
    from torch.utils import backend_registration as registration

    class Module(registration._DummyBackendModule):
        get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
        set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))

    registration._setup_privateuseone_for_python_backend(DEVICE, Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("convolution_overrideable", _convolution, "PrivateUse1")  # torch's own only raise
    aten.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    aten.impl("_grouped_mm", _grouped_mm, "PrivateUse1")
    getitem = torch.Tensor.__getitem__
    torch.Tensor.__getitem__ = lambda x, index: getitem(x, _listed(index) if _is_here(x) else index)
    torch.tensor, torch.as_tensor = _from_data(torch.tensor), _from_data(torch.as_tensor)
    new_tensor = torch.Tensor.new_tensor
    torch.Tensor.new_tensor = lambda x, data, **options: (
        torch.tensor(data, **{"dtype": x.dtype, "device": x.device, **options})
        if _is_here(x) else new_tensor(x, data, **options))  # fmt: skip
    backend = dist.ProcessGroup._get_backend  # torch asks what it can do; `DeviceOnly` does it
    dist.ProcessGroup._get_backend = lambda group, device: backend(group, torch.device("cpu"))
    types = dist.ProcessGroup._device_types
    dist.ProcessGroup._device_types = property(
        lambda group: [torch.device(DEVICE)] if _WATCHES and group.group_name not in _GLOO
        else types.__get__(group))  # fmt: skip
    dist.new_group = _named(dist.new_group)
    return library, aten


def _convolution(*args):
    return _run(torch.ops.aten.convolution.default, args, {})


def _convolution_backward(grad, x, weight, *rest):
    args = (grad, x, weight, grad.shape[1:2], *rest)  # the third: of the bias
    return _run(torch.ops.aten.convolution_backward.default, args, {})


def _grouped_mm(*args, **kwargs):
    """Multiply in groups as on an H100: one kernel for bfloat16; any other dtype group by group, which the host reads."""
    for watch in _WATCHES if args[0].dtype != torch.bfloat16 else ():
        watch.note("groups of a product to cpu")
    return _run(torch.ops.aten._grouped_mm.default, args, kwargs)


def _listed(index):
    """Convert lists in an index to device tensors, which torch copies to the device."""
    many = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(x, list) for x in many):
        return index
    return tuple(torch.tensor(x, device=DEVICE) if isinstance(x, list) else x for x in many)


def _from_data(make):
    """Wrap torch.tensor and similar functions: values of a list are copied to the device, and the host waits."""

    def wrapped(data, *args, device=None, **kwargs):
        if device is None or torch.device(device).type != DEVICE or isinstance(data, torch.Tensor):
            return make(data, *args, device=device, **kwargs)
        for watch in _WATCHES:
            watch.note(f"{type(data).__name__} to {DEVICE}")
        return _on_device(make(data, *args, **kwargs))

    return wrapped


def _named(make):
    """Wrap dist.new_group; note the groups with gloo, which serve the CPU too."""

    def new_group(*args, backend=None, **kwargs):
        group = make(*args, backend=backend, **kwargs)
        if backend == "gloo":
            _GLOO.add(group.group_name)
        return group

    return new_group


def _is_here(x):
    return isinstance(x, torch.Tensor) and x.device.type == DEVICE


def _raw(x):
    """Return the CPU tensor that shares the memory of a device tensor."""
    if not _is_here(x):
        return x
    raw = torch.empty(0, dtype=x.dtype)
    return raw.set_(x.untyped_storage().raw, x.storage_offset(), x.shape, x.stride())


def _on_device(raw, storage=None, found=None):
    """Return a device tensor over the memory of a CPU tensor, or turn `found` into it."""
    if storage is None:
        own = raw.untyped_storage()
        place, nbytes = torch.device(DEVICE, 0), own.nbytes()
        storage = torch._C._construct_storage_from_data_pointer(own.data_ptr(), place, nbytes)
        storage.raw = own
    found = torch._C._acc.create_empty_tensor((0,), raw.dtype) if found is None else found
    on_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    layout = (raw.storage_offset(), raw.shape, raw.stride())
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(on_cpu, found, storage, *layout)
    return found


def _tensors(*trees):
    return [x for x in tree_leaves(trees) if isinstance(x, torch.Tensor)]


def _run(func, args, kwargs):
    """Run the operation on CPU memory; the result is on the device unless requested elsewhere."""
    name = func.name().split("::")[1].split(".")[0]
    device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    tensors = _tensors(args, kwargs)
    if name not in MIX and any(not _is_here(x) and x.ndim for x in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device: {func}, cpu too")
    for watch in _WATCHES:
        watch.count(name, args, tensors, device)
    if name == "_copy_from":  # copy_ calls it for a device without a backend
        _raw(args[1]).copy_(_raw(args[0]))
        return args[1]
    kwargs = kwargs | ({"device": torch.device("cpu")} if _names(device) else {})
    raws = {id(x): _raw(x) for x in tensors}
    out = _on_numbers(func, *tree_map(lambda x: raws.get(id(x), x), (args, kwargs)))
    given = [(x, raws[id(x)]) for x in tensors]
    for x, raw in given:
        if _is_here(x) and raw.shape != x.shape:  # out= gave it a size
            _on_device(raw, found=x)
    storages = {
        raw.untyped_storage()._cdata: x.untyped_storage() for x, raw in given if _is_here(x)
    }
    if device is not None and not _names(device):
        return out.clone() if out.untyped_storage()._cdata in storages else out
    same = {id(raw): x for x, raw in given}
    return tree_map(lambda x: same.get(id(x), x) if id(x) in same else _kept(x, storages), out)


def _names(device):
    return device is not None and device.type == DEVICE


def _kept(x, storages):
    if not isinstance(x, torch.Tensor):
        return x
    return _on_device(x, storages.get(x.untyped_storage()._cdata))


def _on_numbers(func, args, kwargs):
    """Run the operation on CPU memory; a number where a tensor is expected becomes a 0-dim tensor."""
    args = [torch.as_tensor(x) if isinstance(x, int | float) and "Tensor" in str(takes.type) else x
            for x, takes in zip(args, func._schema.arguments, strict=False)]  # fmt: skip
    with torch.no_grad():
        if func.name() == "aten::histc" and not args[0].is_floating_point():  # a GPU counts them
            return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
        return func(*args, **kwargs)


class DeviceOnly(TorchDispatchMode):
    """Context in which process groups serve the device only, and the host's waits for it are counted."""

    def __init__(self):
        super().__init__()
        self.waits = Counter()
        self.uncapturable = Counter()  # those of a model's forward or backward
        self.collectives = Counter()

    def __enter__(self):
        _WATCHES.append(self)
        return super().__enter__()

    def __exit__(self, *error):
        _WATCHES.remove(self)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace != "c10d":
            return func(*args, **kwargs)
        name = func.name().split("::")[1].split(".")[0]
        self.collectives[name] += 1
        on_cpu = any(not _is_here(x) for x in _tensors(args))
        if on_cpu and name != "barrier" and not _of_torch_itself() and not _is_gloo(args):
            raise RuntimeError(f"No backend type associated with device type cpu: {name} {where()}")
        given = {id(x): _raw(x) for x in _tensors(args, kwargs)}
        out = func(*tree_map(lambda x: given.get(id(x), x), args), **kwargs)
        ours = {id(given[id(x)]): x for x in _tensors(args)}
        return tree_map(lambda x: ours.get(id(x), x), out)

    def count(self, name, args, tensors, device):
        """Note an operation for which the host waits."""
        if name in ASKS:
            self.note(name)
        elif name in {"_copy_from", "_to_copy"}:
            source, target = tensors[0].device, tensors[1].device if tensors[1:] else device
            if target is not None and source.type != target.type:
                self.note(f"copy {source.type} to {target.type}")
        elif name.startswith(("index", "_index")):
            index = _tensors(args[1:2])
            if any(x.dtype in (torch.bool, torch.uint8) for x in index):
                self.note("bool index")
            if _is_here(args[0]) and any(not _is_here(x) for x in index):
                self.note("index of the CPU")  # torch copies it to the device

    def note(self, what):
        """Count one wait; within layers or a backward it could not be captured in a CUDA graph."""
        self.waits[what, where()] += 1
        if in_layers():
            self.uncapturable[what, where()] += 1


def in_layers():
    """Return True where the forward of a class of transformers, or a backward, is on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if (
            frame.f_code.co_name == "backward"
            or "/transformers/models/" in frame.f_code.co_filename
        ):
            return True
        frame = frame.f_back
    return False


def where():
    """Return the innermost stack line outside torch and this file."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and not file.endswith(("other_device.py", "loss_means.py")):
            return f"{'/'.join(file.split('/')[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _of_torch_itself():
    """Return True within torch's own collectives of objects, whose tensors are on the group's device."""
    frame = sys._getframe(1)
    while frame is not None:
        if "_object" in frame.f_code.co_name and "distributed_c10d" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _is_gloo(args):
    groups = [dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject)
              and "ProcessGroup" in str(x._type())]  # fmt: skip
    return any(group.group_name in _GLOO for group in groups)
