"""Export a converted network to ONNX, and compare its output with onnxruntime's.

    python examples/export_onnx.py resnet18
    python examples/export_onnx.py vgg16 --load vgg16-dcl.safetensors -o vgg16-dcl.onnx

Needs the extra: pip install '.[onnx]'. The batch size is dynamic, the image size is fixed. Exits with 1 if they differ.
"""

import argparse
import warnings
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor, nn
from torchvision.models import get_model

import torch_dcl as dcl


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", nargs="?", default="resnet18", help="a name of torchvision (default: resnet18)")
    parser.add_argument("--load", type=Path, metavar="FILE", help="what save_model wrote; without it, random weights")
    parser.add_argument("--only", nargs="+", metavar="UNIT", help="without --load: names or globs of what to convert")
    parser.add_argument("--size", type=int, default=224, help="height and width of an image (default: 224)")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative difference to accept (default: 1e-4)")
    parser.add_argument("-o", "--output", type=Path, help="where to write (default: NETWORK-dcl.onnx)")
    return parser.parse_args()


def converted(given: argparse.Namespace) -> nn.Module:
    """The network of the file, or a fresh one with DCL layers."""
    if given.load is not None:
        return dcl.load_model(lambda: get_model(given.network, weights=None), given.load).eval()
    model = get_model(given.network, weights=None).eval()
    plan = dcl.plan(model, (3, given.size, given.size), eps=1.0)  # many random layers in a row: see docs/numerics.md
    dcl.convert_(model, plan.only(*given.only) if given.only else plan, init="random")
    return model


def export(model: nn.Module, size: int, path: Path) -> None:
    example = torch.randn(2, 3, size, size)
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about itself
        program = torch.onnx.export(model, (example,), dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    program.save(path)


@torch.no_grad()
def difference(model: nn.Module, session: onnxruntime.InferenceSession, batch: Tensor) -> float:
    """How far onnxruntime's output is from torch's, as a part of the largest number in it."""
    ours = model(batch)
    theirs = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: batch.numpy()})[0])
    return ((theirs - ours).abs().max() / ours.abs().max()).item()


def main() -> None:
    given = read_arguments()
    model = converted(given)
    path = given.output or Path(f"{given.network}-dcl.onnx")
    export(model, given.size, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    worst = 0.0
    for count in (1, 2, 5):
        found = difference(model, session, torch.randn(count, 3, given.size, given.size))
        print(f"batch of {count}: differs by {found:.1e} of the largest output")
        worst = max(worst, found)
    print(f"Written to {path}")
    if not worst <= given.tolerance:
        raise SystemExit(f"the outputs differ by {worst:.1e}, more than {given.tolerance:.1e}")


if __name__ == "__main__":
    main()
