"""The layers of ResNet-50 as units, and strategies for small made-up models."""

from dataclasses import dataclass

import hypothesis.strategies as st

from kronfac.placement.costs import LayerUnit, PartUnit, StatisticUnit

#: Above this width a layer is solved by Cholesky.
WIDEST_EIGEN = 2048


@dataclass(frozen=True)
class Shape:
    """A layer's name and the widths of its two factors."""

    name: str
    input: int
    output: int


def resnet50_shapes() -> list[Shape]:
    """53 convolutions without bias and the classifier with one."""
    shapes = [Shape("conv1", 3 * 49, 64)]
    channels = 64
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            shapes.append(Shape(f"{name}.conv1", channels, width))
            shapes.append(Shape(f"{name}.conv2", 9 * width, width))
            shapes.append(Shape(f"{name}.conv3", width, 4 * width))
            if block == 0:
                shapes.append(Shape(f"{name}.downsample", channels, 4 * width))
            channels = 4 * width
    return [*shapes, Shape("fc", 2049, 1000)]


def unit(shape: Shape, widest_eigen: int = WIDEST_EIGEN) -> LayerUnit:
    """Statistics and parts ``A`` and ``G``; eigen if narrow, otherwise Cholesky, which can be split."""
    eigen = max(shape.input, shape.output) <= widest_eigen

    def part(name: str, width: int) -> PartUnit:
        cube = width**3
        return PartUnit(
            name=name,
            statistics=(f"{shape.name}/{name}",),
            flops=9 * cube if eigen else cube,
            solution_elements=width * width + (width if eigen else 0),
            shared_flops=None if eigen else cube // 3,
        )

    widths = {"A": shape.input, "G": shape.output}
    return LayerUnit(
        name=shape.name,
        statistics=tuple(
            StatisticUnit(f"{shape.name}/{name}", width * (width + 1) // 2)
            for name, width in widths.items()
        ),
        parts=tuple(part(name, width) for name, width in widths.items()),
        precondition_flops=(4 if eigen else 2)
        * shape.input
        * shape.output
        * (shape.input + shape.output),
        gradient_elements=shape.input * shape.output,
    )


def resnet50(widest_eigen: int = WIDEST_EIGEN) -> list[LayerUnit]:
    """All 54 layers; with ``widest_eigen=0`` all are solved by Cholesky."""
    return [unit(shape, widest_eigen) for shape in resnet50_shapes()]


def deeper(layers: int, widest_eigen: int = WIDEST_EIGEN) -> list[LayerUnit]:
    """ResNet-50's shapes over and over, up to a number of layers."""
    shapes = resnet50_shapes()
    return [
        unit(Shape(f"{index}.{shape.name}", shape.input, shape.output), widest_eigen)
        for index in range(layers)
        for shape in [shapes[index % len(shapes)]]
    ]


@st.composite
def models(draw: st.DrawFn, largest: int = 12, ties: bool = False) -> list[LayerUnit]:
    """A few layers of any widths, some with a single part or a statistic that two parts need."""
    made: list[LayerUnit] = []
    for index in range(draw(st.integers(0, largest))):
        shape = Shape(f"l{index}", draw(st.integers(1, 3000)), draw(st.integers(1, 3000)))
        layer = unit(shape, draw(st.sampled_from([0, 64, 4096])))
        kind = draw(st.sampled_from(["both", "one", "joint"]))
        statistics, parts = layer.statistics, layer.parts
        if kind == "one":
            statistics, parts = statistics[:1], parts[:1]
        elif kind == "joint":
            keys = tuple(statistic.key for statistic in statistics)
            parts = tuple(
                PartUnit(p.name, keys, p.flops, p.solution_elements, p.shared_flops) for p in parts
            )
        tied = draw(st.sampled_from([layer.name, *(other.tied_to for other in made)]))
        made.append(
            LayerUnit(
                layer.name,
                statistics,
                parts,
                layer.precondition_flops,
                layer.gradient_elements,
                tied_to=tied if ties else layer.name,
            )
        )
    return made
