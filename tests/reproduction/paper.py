"""What the paper reports (PipeDream, SOSP'19, Table 1), and the clusters and models that it was measured on."""

from __future__ import annotations

from dataclasses import dataclass

from reproduction.results import Results

# name -> file in pdtool/zoo, settings, samples in a minibatch of a worker (section 5.1)
MODELS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "VGG-16": ("vgg16", (), 64),
    "ResNet-50": ("resnet50", (), 128),
    "AlexNet": ("alexnet", (), 256),
    "GNMT-16": ("gnmt", ("layers=16",), 64),
    "GNMT-8": ("gnmt", ("layers=8",), 64),
    "AWD LM": ("awd_lm", (), 80),
    "S2VT": ("s2vt", (), 80),
}


@dataclass(frozen=True)
class PaperCluster:
    """One of the paper's clusters (section 5.1).

    Attributes:
        device: name in pdtool's device table.
        between, within: bandwidth of a server's link, and of a device's link inside a server.
    """

    device: str
    between: str
    within: str


CLUSTERS = {
    "A": PaperCluster("v100", "10Gbit/s", "12GB/s"),  # PCI Express 3.0 x16
    "B": PaperCluster("v100", "25Gbit/s", "20GB/s"),  # NVLink
    "C": PaperCluster("titanx", "40Gbit/s", "12GB/s"),
}


@dataclass(frozen=True)
class Row:
    """A row of Table 1.

    Attributes:
        servers, devices: of each server.
        configuration: replicas of the stages, or `straight`.
        gain: in epoch time over data parallelism.
    """

    model: str
    servers: int
    devices: int
    cluster: str
    configuration: str
    gain: float

    @property
    def workers(self) -> int:
        """Number of devices."""
        return self.servers * self.devices

    @property
    def topology(self) -> str:
        """As --topology takes it: a level of one member is none."""
        return "x".join(str(size) for size in (self.servers, self.devices) if size > 1)

    @property
    def bandwidth(self) -> str:
        """As --bandwidth takes it."""
        cluster = CLUSTERS[self.cluster]
        levels = (self.servers, cluster.between), (self.devices, cluster.within)
        return ",".join(speed for size, speed in levels if size > 1)

    @property
    def strategy(self) -> tuple[str, ...]:
        """Options of `pdtool partition` for the paper's configuration."""
        if self.configuration == "straight":
            return ("--strategy", "straight")
        if self.configuration == str(self.workers):
            return ("--strategy", "data-parallel")
        return ("--replicas", self.configuration)


TABLE_1 = (
    Row("VGG-16", 4, 4, "A", "15-1", 5.28),
    Row("VGG-16", 2, 8, "B", "15-1", 2.98),
    Row("ResNet-50", 4, 4, "A", "16", 1.0),
    Row("ResNet-50", 2, 8, "B", "16", 1.0),
    Row("AlexNet", 4, 4, "A", "15-1", 4.92),
    Row("AlexNet", 2, 8, "B", "15-1", 2.04),
    Row("GNMT-16", 1, 4, "A", "straight", 1.46),
    Row("GNMT-16", 4, 4, "A", "straight", 2.34),
    Row("GNMT-16", 2, 8, "B", "straight", 3.14),
    Row("GNMT-8", 1, 4, "A", "straight", 1.5),
    Row("GNMT-8", 3, 4, "A", "straight", 2.95),
    Row("GNMT-8", 2, 8, "B", "16", 1.0),
    Row("AWD LM", 1, 4, "A", "straight", 4.25),
    Row("S2VT", 4, 1, "C", "2-1-1", 3.01),
)


def profile(results: Results, model: str, device: str) -> str:
    """Return the path of the estimated profile of a model at paper size."""
    file, settings, batch_size = MODELS[model]
    return results.profile(file, device, batch_size, *settings)
