"""Makes mypy read f32["B/d L"] as Any, and Stacked["layers", Layer] and Subset[Layer] as Layer."""

from mypy.plugin import AnalyzeTypeContext, Plugin
from mypy.types import AnyType, Type, TypeOfAny

NAMES = ("f32", "bf16", "compute", "i32", "u32", "bool_", "floating", "integer")
ARRAYS = {f"shardlib.types.{name}" for name in NAMES}


def array(_: AnalyzeTypeContext) -> Type:
    return AnyType(TypeOfAny.explicit)


def stacked(context: AnalyzeTypeContext) -> Type:
    return context.api.analyze_type(context.type.args[-1])


class ShardlightPlugin(Plugin):
    def get_type_analyze_hook(self, fullname):
        if fullname in {f"shardlib.types.{name}" for name in ("Mapped", "Subset", "Stacked")}:
            return stacked
        return array if fullname in ARRAYS else None


def plugin(version: str) -> type[Plugin]:
    return ShardlightPlugin
