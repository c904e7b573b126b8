"""What a compiler makes of the operations, where there is no GPU: fake tensors are traced, and the kernels compiled.

A compiler writes each kernel into code of its own, with its numbers in float64, and works out which arguments a kernel
writes to; all others it need not copy.
"""

import importlib.util
import sys

import pytest
import torch
from tests.halves import slow
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, PythonFunctionalizeAPI
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from torch_dcl.kernels import launch, launcher, ops  # noqa: F401 - the operations

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which is not installed"
)
SHARED = {80: 163, 86: 99, 90: 227}
"""KiB of shared memory that a program may take, by compute capability."""
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64"}
WRITTEN = {
    "_moments": {"parts"}, "_statistics": {"running_mean", "running_var", "stats", "low"}, "_fixed": {"stats", "low"},
    "_wide_statistics": {"running_mean", "running_var", "stats", "low"}, "_gradients": {"dw", "numbers"},
    "forward": {"out", "low"}, "backward_rows": {"dy"}, "add_statistics_gradient_": {"dy"},
    "sum_partials_": {"dbias", "dw"},
    "_fuse_forward": {"out"}, "_saved_forward": {"pre", "out", "low"}, "_saved_backward": {"dy", "dw", "dbias"},
}  # fmt: skip
"""What a kernel writes to; `backward` and the fusion's write more where more is asked for."""


@pytest.fixture
def gpu(monkeypatch):
    """A Hopper GPU as far as tracing asks for one."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from torch_dcl.kernels import moments, project

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

        def get_active_torch_device(self):
            return torch.device("cuda", 0)

        @classmethod
        def is_active(cls):
            return True

    before = getattr(driver, "_active", None)
    driver.set_active(Driver())
    for module in (launcher, moments, project):
        monkeypatch.setattr(module, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(moments, "has_large_shared_memory", lambda _: True)
    monkeypatch.setattr(launch, "_hopper_kernels_on", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    yield
    driver._active = before


def traced(function, *given):
    """The launches that a compiler finds in a function: kernel, arguments by name, and what they say they write to."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    def functional(*args):
        api = PythonFunctionalizeAPI()
        wrapped = tree_map_only(torch.Tensor, api.wrap_tensors, args)
        with FunctionalTensorMode():
            found = function(*wrapped)
        return tree_map_only(torch.Tensor, api.unwrap_tensors, found)

    graph = make_fx(functional, tracing_mode="fake")(*given).graph
    launches = []
    for node in graph.nodes:
        if "triton_kernel_wrapper" not in str(node.target):
            continue
        kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
        options = {}
        while not hasattr(kernel, "arg_names") or hasattr(kernel, "configs"):  # what carries the options of a launch
            options = {k: v for k, v in vars(kernel.configs[0]).items() if k in ("num_warps", "num_stages")}
            kernel = kernel.fn
        given = {name: getattr(value, "meta", {"val": value})["val"] for name, value in node.kwargs["kwargs"].items()}
        launches.append((kernel, {**constants, **given}, options, set(node.kwargs["tensors_to_clone"])))
    return launches


def compile_as_emitted(kernel, given, options, folder, capability):
    """Compile the code that a compiler writes for a kernel; give the shared memory it takes in KiB."""
    import triton
    from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    code = user_defined_triton_kernel_transitive_closure_source_code(kernel)
    path = folder / f"emitted_{kernel.fn.__name__}_{abs(hash(code))}.py"
    path.write_text(f"import triton\nimport triton.language as tl\n\n@triton.jit\n{code}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    emitted = getattr(module, kernel.fn.__name__)
    emitted = emitted if hasattr(emitted, "arg_names") else triton.jit(emitted)
    signature, constants, hints = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            hints[place,] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[place,] = value
        else:
            signature[parameter.name] = "fp64" if isinstance(value, float) else "i32"
    source = ASTSource(emitted, signature, constants, hints)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared / 1024


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, device="cuda", dtype=dtype)


def project_and_back(T, pairs, keep, bias):
    def run(y, weight, of_bias, grad):
        settings = (T, 0.01, pairs, keep)
        z, low, pre = torch.ops.torch_dcl.project(y, weight, of_bias if bias else None, *settings)
        back, low = torch.ops.torch_dcl.project_backward, low if low.numel() else weight
        return z, *back(grad, y, low, of_bias if bias else None, pre, torch.float32, *settings)

    return run


def norm_and_back(T, fixed):
    def run(y, weight, numbers, grad):
        own, given = torch.ops.torch_dcl, (y, weight, None, *numbers[:4])
        if fixed:
            known, low = own.fixed_statistics(*given, T, 1e-5)
        else:
            known, low = own.statistics(*given, numbers[4], T, 1e-5, 0.1)
        z = own.normed_project(y, known, low, T, 0.01, False, fixed)
        return z, *own.normed_project_backward(grad, y, known, low, torch.float32, T, 0.01, False, fixed)

    return run


def norm_and_infer(T):
    def run(y, weight, numbers, _):
        return torch.ops.torch_dcl.normed_infer(y, weight, None, *numbers[:4], T, 0.01, False, 1e-5)

    return run


CASES = {
    "conv, narrow": (project_and_back(2, False, False, True), 4096, 2, 16, 64),
    "conv, deep, without biases": (project_and_back(2, False, False, False), 3136, 2, 128, 512),
    "conv, three branches": (project_and_back(3, False, False, True), 3136, 3, 32, 128),
    "conv, pairs of three": (project_and_back(3, True, False, True), 3136, 3, 32, 128),
    "linear": (project_and_back(2, False, True, True), 64, 2, 64, 256),
    "linear, many rows": (project_and_back(2, False, True, True), 1024, 2, 64, 256),
    "batch norm": (norm_and_back(2, False), 4096, 2, 16, 64),
    "batch norm, deep": (norm_and_back(2, False), 3136, 2, 128, 512),
    "batch norm, three branches": (norm_and_back(3, False), 3136, 3, 32, 128),
    "fixed norm": (norm_and_back(2, True), 4096, 2, 16, 64),
    "fixed norm, inference": (norm_and_infer(2), 4096, 2, 16, 64),
    "fixed norm, inference, three branches": (norm_and_infer(3), 4096, 3, 16, 64),
}


LITTLE_ROOM = {"batch norm, deep": (norm_and_back(2, False), 3137, 2, 128, 512)}
"""On GPUs with less shared memory; of other sizes, since what runs for a size is decided once."""


def launches_of(name, dtype, cases=CASES):
    run, P, T, M, N = cases[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        y, weight, grad = empty(P, T * M, dtype=dtype), empty(T * M, N), empty(P, N, dtype=dtype)
        other = empty(T, N)
        if "norm" in name:
            other = [*(empty(T * N) for _ in range(4)), empty(dtype=torch.int64)]
        return traced(run, y, weight, other, grad)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16), slow(torch.float32)], ids=str)
def test_a_compiler_sees_the_kernels_and_which_of_their_arguments_they_write_to(name, dtype, gpu):
    launches = launches_of(name, dtype)
    assert launches, "nothing of it is open to the compiler"
    check_what_is_written(launches)


def check_what_is_written(launches):
    for kernel, given, _, written in launches:
        own = kernel.fn.__name__
        expected = WRITTEN.get(own, {"out"})
        if own == "backward":
            expected = {"parts"} | ({"dpre"} if given["KEEP"] else set()) | ({"dy"} if given["FULL"] else set())
        if not given.get("ROUNDED", True):  # weights of the type that is computed in are not written again
            expected = expected - {"low"}
        large = {argument for argument in written if given[argument].numel() > 1}
        assert large == expected, own


@pytest.mark.parametrize("capability", [slow(80), slow(86), 90])
@pytest.mark.parametrize("name", ["conv, narrow", "linear", slow("batch norm"), "fixed norm", "fixed norm, inference"])
def test_the_code_that_a_compiler_writes_for_the_kernels_compiles(name, capability, gpu, tmp_path):
    seen = set()
    for kernel, given, options, _ in launches_of(name, torch.bfloat16):
        own = kernel.fn.__name__
        if own not in seen and not (name == "fixed norm" and own != "_fixed"):  # the others are those of batch norm
            assert compile_as_emitted(kernel, given, options, tmp_path, capability) <= SHARED[capability], own
        seen.add(own)


def test_statistics_of_many_filters_fit_on_a_gpu_with_less_shared_memory(gpu, monkeypatch, tmp_path):
    from torch_dcl.kernels import moments

    monkeypatch.setattr(moments, "has_large_shared_memory", lambda _: False)
    launches = launches_of("batch norm, deep", torch.bfloat16, LITTLE_ROOM)
    check_what_is_written(launches)
    by_name = {kernel.fn.__name__: (kernel, *rest) for kernel, *rest, _ in launches}
    assert "_statistics" not in by_name
    for name in ("_moments", "_wide_statistics"):
        assert compile_as_emitted(*by_name[name], tmp_path, 86) <= SHARED[86], name


@pytest.mark.parametrize("pairs", [False, True])
def test_the_fusion_is_open_to_a_compiler(pairs, gpu, tmp_path):
    def run(pre, grad):
        return torch.ops.torch_dcl.fuse(pre, 0.01, pairs), *torch.ops.torch_dcl.fuse_backward(grad, pre, 0.01, pairs)

    with FakeTensorMode(allow_non_fake_inputs=True):
        launches = traced(run, [empty(64, 32) for _ in range(3)], empty(64, 32))
    assert [kernel.fn.__name__ for kernel, *_ in launches] == ["_fuse_forward", "_fuse_backward"]
    assert [written for *_, written in launches] == [{"out"}, {"d0", "d1", "d2"}]
    for kernel, given, options, _ in launches:
        compile_as_emitted(kernel, given, options, tmp_path, 90)
