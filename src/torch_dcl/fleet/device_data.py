"""The data of a fleet on the device, and checks of it."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from torch_dcl.fleet import operations
from torch_dcl.fleet.augmentation import Augmenter, Inputs
from torch_dcl.fleet.member import Member, check_networks

__all__ = ["DeviceData", "Labelled", "check_data", "check_fleet", "check_labels"]

Labelled = tuple[Tensor, Tensor]


class DeviceData:
    """The data of all members on the device, by its names. Images that several names share are stored once.

    Without inputs images are divided by 255; in training inputs are augmented.
    """

    def __init__(
        self,
        data: Mapping[str, Labelled],
        names: Sequence[str],
        device: torch.device,
        inputs: Inputs | None = None,
        *,
        train: bool = False,
    ) -> None:
        images: dict[tuple[object, ...], int] = {}
        stored: list[Tensor] = []
        labels: dict[str, int] = {}
        for name in dict.fromkeys(names):
            pixels = data[name][0]
            if _identity(pixels) not in images:
                images[_identity(pixels)] = len(stored)
                stored.append(pixels.to(device).contiguous())
            labels[name] = len(labels)
        self.images = stored[0][None] if len(stored) == 1 else torch.stack(stored)
        if self.images.dim() == 4:
            self.images = self.images[:, :, None]
        self.labels = torch.stack([data[name][1].to(device) for name in labels])
        self.image_of = torch.tensor([images[_identity(data[name][0])] for name in names], device=device)
        self.label_of = torch.tensor([labels[name] for name in names], device=device)[:, None]
        self.count = self.images.shape[1]
        self.size = tuple(self.images.shape[2:])
        self.train, self._augmenter = train, None
        if inputs is not None:
            self._augmenter = Augmenter(inputs, len(names), self.count, self.size, device, train=train)
            self.size = self._augmenter.size

    def begin_epoch(self, seeds: Sequence[int], epoch: int) -> None:
        """Draw the crops and flips of an epoch from the seed of each network."""
        if self._augmenter is not None:
            self._augmenter.begin_epoch(seeds, epoch, self.images.shape[3:])

    def gather(self, index: Tensor, dtype: torch.dtype) -> Labelled:
        """Inputs ``[E, B, C, h, w]`` and labels ``[E, B]`` of the indices ``[E, B]``."""
        if self._augmenter is not None and self._augmenter.kernel_accepts(self.images, dtype):
            return self._augmenter.gather(self.images, self.image_of, self.labels, self.label_of, index, dtype)
        labels = self.labels[self.label_of, index]
        if self._augmenter is None:
            return operations.gather_images(self.images, self.image_of, index, dtype), labels
        images = self.images[self.image_of[:, None], index]
        if self.train:
            return self._augmenter.augment(images, index, dtype), labels
        return self._augmenter.crop_centre(images, dtype), labels


def _identity(images: Tensor) -> tuple[object, ...]:
    """A key that is equal for two views of the same memory."""
    return images.device, images.data_ptr(), images.shape, images.stride()


def check_data(data: Mapping[str, Labelled], wanted: Iterable[tuple[str, str]]) -> int:
    """Refuse data that one fleet cannot train on, by names of networks and data; return the number of images."""
    sizes = set()
    for member, name in wanted:
        if name not in data:
            raise ValueError(f"there is no data {name!r} for {member!r}; given: {', '.join(map(repr, data))}")
        images, labels = data[name]
        if images.dtype != torch.uint8 or images.dim() not in (3, 4):
            raise ValueError(
                f"images of {name!r} must be uint8 [N, H, W] or [N, C, H, W], got {images.dtype} {list(images.shape)}"
            )
        if len(images) != len(labels):
            raise ValueError(f"{name!r} has {len(images)} images and {len(labels)} labels")
        if labels.dtype != torch.int64 or labels.dim() != 1:
            raise ValueError(f"labels of {name!r} must be int64 [N], got {labels.dtype} {list(labels.shape)}")
        sizes.add(tuple(images.shape))
    if len(sizes) > 1:
        raise ValueError(f"all data of a fleet must have one size, got {sorted(sizes)}; use one fleet for each size")
    return int(sizes.pop()[0])


def check_labels(data: Mapping[str, Labelled], classes: int) -> None:
    """Refuse labels that are not classes of the networks."""
    for name, (_, labels) in data.items():
        low, high = (int(extreme) for extreme in torch.aminmax(labels))
        if low < 0 or high >= classes:
            wrong = low if low < 0 else high
            raise ValueError(f"{name!r} has the label {wrong}, but the networks have {classes} classes (from 0)")


def check_fleet(
    networks: Sequence[nn.Module], members: Sequence[Member], data: Mapping[str, Labelled], batch: int
) -> None:
    """Refuse networks, members and data that do not match."""
    if len(networks) != len(members):
        raise ValueError(f"a fleet needs a member for each network, got {len(networks)} and {len(members)}")
    if not networks:
        raise ValueError("a fleet needs at least one network")
    check_networks(networks, members)
    count = check_data(data, [(member.name, member.data) for member in members])
    if not 1 <= batch <= count:
        raise ValueError(f"batch must be from 1 to {count}, the number of images, got {batch}")
