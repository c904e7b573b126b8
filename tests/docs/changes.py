"""What is changed in the pages' code before the tests run it, and why. What is not listed is run as it stands.

A change that no page needs any more fails a test, and so does a snippet that cannot be run.
"""

import torch

# Commands, as they stand on a page: words that are added to them, because the full command would take minutes or hours.
TINY = "--epochs 1 --set train_images=100 --set test_images=50 --set batch=50 --set warmup=2"
ADDED = {
    "dcl demo": "--images 100 --epochs 1 --seeds 1",
    "dcl demo --epochs 8 --seeds 5 --out my-demo": "--images 100 --epochs 1 --seeds 1",
    "dcl plan torchvision:resnet18 --only layer4.0.conv1 --measure": "--input-size 3,32,32",
    "dcl plan torchvision:resnet18 --select faster --batch 16": "--input-size 3,32,32 --batch 2 --only layer4*",
    "dcl plan torchvision:vgg16 --measure --only 'classifier.*'": "--input-size 3,32,32",
    "dcl plan vgg16 --measure --device cuda --batch 64 --dtype bfloat16": "--device cpu --batch 2 --input-size 3,32,32",
    "dcl plan vgg16 --select faster --mode compile --phase infer --device cuda --batch 64": (
        "--device cpu --mode eager --batch 2 --input-size 3,32,32"
    ),
    "dcl run table1": f"--sets II-01 --models baseline,A2 --seeds 1 {TINY}",
    "dcl run table1 --sets II-01,III-10 --seeds 5": "--dry-run",
    "dcl run table1 --sets II-01,III-10 --models baseline,A2,low-rank --seeds 5 --out runs/part": f"--seeds 1 {TINY}",
    "dcl run table1 --set epochs=12 --set batch=50 --out runs/short": (
        f"--sets II-01 --models A2 --seeds 1 {TINY}".replace("--epochs 1", "--set epochs=1")
    ),
    "dcl run table1 --sets II-01,III-10 --models baseline,A2 --seeds 5 --data mnist/": f"--seeds 1 {TINY}",
    "dcl run table2 --networks bignet --data cifar10 --seeds 3 --minutes 9": (
        "--smoke --networks lenet --models lenet --seeds 1"
    ),
    "dcl run chart --data cifar10 --smoke": "--dry-run",
    "dcl run figures --set parts=filters,curves": (
        "--smoke --set parts=filters --set filters=10,25 --seeds 1 --out runs/figures"
    ),
    "dcl run mine.toml --out runs/mine": f"--sets II-01 --models A2 --seeds 1 {TINY}",
    "dcl run table1 --minutes 20 --out runs/slices": f"--sets II-01 --models A2 --seeds 1 {TINY}",
    "dcl run table2 --networks bignet --data cifar10 --seeds 3": (
        "--smoke --networks lenet --models lenet,lenet+dcl --seeds 1 --out runs/table2"
    ),
    "dcl run table2 --networks bignet --data cifar10": "--dry-run",
    "dcl run table2 --networks lenet --data cifar10 --seeds 5 --out runs/lenet": "--smoke --models lenet --seeds 1",
    "dcl run table2 --networks wrn --data cifar10 --seeds 1 --out runs/wrn": "--smoke --models wrn",
    "dcl run chart --data cifar10": "--smoke --set units=dcl,star --seeds 1 --out runs/chart",
    "dcl run relations --data mnist/": "--dry-run --device cpu",
    "dcl run relations --data mnist/ --seeds 10 --set tasks=same,difference --set sizes=3000,6000,20000,60000": (
        "--dry-run --device cpu"
    ),
    "dcl run relations --data mnist/ --seeds 10 --models narrow,low-rank,summed,A2,A3S,GLU,SORT": (
        "--dry-run --device cpu"
    ),
    "dcl run table2 --smoke": "--models lenet --seeds 1",
    "dcl run figures": "--smoke --set parts=filters --set filters=10,25 --seeds 1",
    "dcl run knowledge.toml": "--set size=32 --set images=20",
    "dcl run calibration --sets II-01 --out runs/calibration": "--smoke",
    "dcl run table1-search --models baseline,A2 --out runs/search": "--dry-run",
    "torchrun --nproc-per-node 8 -m torch_dcl run table1 --data mnist/": "--dry-run",
    "torchrun --nproc-per-node 8 --max-restarts 3 -m torch_dcl run imagenet --data data/imagenet": (
        "--dry-run --device cpu --network torchvision:resnet18 --set crop=64 --set batch=4"
    ),
    "dcl run imagenet --dry-run": "--device cpu --network torchvision:resnet18 --set crop=64 --set batch=4",
    "dcl run table1 --join --out runs/shared": f"--sets II-01 --models A2 --seeds 1 {TINY}",
    "dcl run imagenet --smoke --out runs/try": "--device cpu",
    "dcl run imagenet --network torchvision:resnet50 --budget 0.7 --data data/imagenet --dry-run": (
        "--device cpu --network torchvision:resnet18 --set crop=64 --set batch=4"
    ),
    "dcl data digits --sets II-01,III-10 --out data/digits": "--images 50",
    "dcl data digits --sets II-01,III-10 --mnist mnist/ --out data/digits": "--images 50",
    "dcl data digits --sets II-01": "--images 50",
    "dcl data digits --mnist mnist/ --out data/digits": "--sets II-01 --images 50",
    "dcl data sheet -o sheet.png": "--sets II-01,III-10 --samples 2",
    "python examples/train_image_folder.py digits/ --make --size 32 --epochs 5": (
        "--network shufflenet_v2_x0_5 --only stage4.1.branch2.0 --epochs 1"
    ),
    "python examples/export_onnx.py resnet18 --load resnet18-dcl.safetensors": "--size 32",
}

# Commands with a word that the reader is meant to fill in.
FILLED = {
    "dcl data prepare imagenet ILSVRC2012/ data/imagenet": (
        "dcl data prepare imagenet my-images data/imagenet --workers 1"
    ),
    "dcl data prepare imagenet ILSVRC2012/ data/imagenet --workers 16": (
        "dcl data prepare imagenet my-images data/imagenet --workers 1"
    ),
    "dcl data prepare imagenet ILSVRC2012/ data/small --size 128 --per-class 100 --skip-corrupt": (
        "dcl data prepare imagenet my-images data/small --size 128 --per-class 2 --skip-corrupt --workers 1"
    ),
    "dcl plan my_package.nets:make --input-size 1,28,28": "dcl plan nets.py:make --input-size 3,28,28",
}

# Commands that are run before a page, for what its reader has by then.
BEFORE = {
    "docs/command.md": [
        "dcl data prepare imagenet my-images data/imagenet --workers 1",
        "dcl run table2 --smoke --networks lenet --models lenet --seeds 1 --out runs/lenet",
        "dcl run table2 --smoke --networks wrn --models wrn --seeds 1 --out runs/wrn",
    ],
}

# Commands on several pages whose products no page uses later: the first page that has one runs it for all.
ONCE = ("dcl demo", "dcl doctor", "dcl run table1 --dry-run", "dcl run table1 --smoke")

# Commands that are looked at and not run, because they would change the environment that the tests run in:
# `make -n` must know the target, and pip's extras must be in pyproject.toml.
LOOKED_AT = ("make", "pip")

# Commands whose words are checked and that are not run, because they download.
CHECKED = ("dcl data fetch mnist", "dcl data fetch cifar10", "dcl data fetch cifar10 --out data")

# Python: what stands on a page, and what is run instead. Every text must occur in the page's snippets.
TEXT = {
    "README.md": {
        "(3, 224, 224)": "(3, 32, 32)",
        "range(75)": "range(2)",
        "Schedule(24)": "Schedule(1)",
        'generate("MNIST-II-01", "train",': 'generate("MNIST-II-01", "train", indices=range(200),',
        "fleet.network(3)": "fleet.network(1)",
    },
    "docs/convert.md": {
        "size=224": "size=32",
        "max_drop=0.5, epochs=10": "max_drop=0.5, epochs=1",
        "(3, 224, 224)": "(3, 64, 64)",
        "torch.randn(2, 3, 224, 224)": "torch.randn(2, 3, 32, 32)",
        'plan.only("layer3*", "layer4*")\ndone': 'plan.only("layer3.0.conv1")\ndone',
    },
    "docs/train.md": {
        "for epoch in range(20)": "for epoch in range(1)",
        "Schedule(epochs=30, warmup=50,": "Schedule(epochs=1, warmup=1,",
        "for seed in range(3)": "for seed in range(1)",
    },
}  # fmt: skip

# Packages that a page needs and the library does not.
NEEDS = {"docs/command.md": ("timm",), "docs/convert.md": ("onnxscript", "onnxruntime")}

# On every page.
ANYWHERE = {} if torch.cuda.is_available() else {'"cuda"': '"cpu"'}
