"""YAML text, read strictly: a key that is there twice is an error, and whatever is wrong in it raises an `MXError`."""

from __future__ import annotations

import io

import yaml

from pt2mx.errors import MXError

#: values that a text may hold, those that aliases repeat counted each time
_MOST = 10_000
#: what PyYAML raises of values that it cannot convert (2020-13-45), beside its own errors
_ERRORS = (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, OverflowError)


def read_yaml(content: bytes, name: str) -> object:
    """The plain data that YAML text holds; errors call the text `name`.

    Raises:
        MXError: where it is none, has a key twice (it names the lines), an anchor in itself, or too many values.
    """
    try:
        stream = io.BytesIO(content)
        stream.name = name  # PyYAML asks for it
        loader = _Loader(stream)
        node = loader.get_single_node()
        if node is None:
            return None
        loader.check(node, {})
        return loader.construct_document(node)
    except MXError:
        raise
    except RecursionError:
        raise MXError("it is nested too deeply") from None
    except _ERRORS as error:
        raise MXError(" ".join(str(error).split()) or type(error).__name__) from None


class _Loader(yaml.SafeLoader):
    def check(self, node: yaml.Node, counts: dict[yaml.Node, int]) -> int:
        """The number of values that a node holds; `MXError` where a key is there twice, or for too many values.
        `counts` has those of the nodes that were seen, and -1 of those around this one."""
        if counts.get(node) == -1:
            raise MXError(f"the anchor in line {_line(node)} holds itself")
        if node not in counts:
            counts[node], parts = -1, node.value if isinstance(node, yaml.CollectionNode) else []
            if isinstance(node, yaml.MappingNode):
                self._check_keys(node)
                parts = [part for pair in parts for part in pair]
            counts[node] = 1 + sum(self.check(part, counts) for part in parts)
            if counts[node] > _MOST:
                raise MXError(f"it has more than {_MOST:,} values")
        return counts[node]

    def _check_keys(self, node: yaml.MappingNode) -> None:
        lines: dict[object, int] = {}
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value != "<<":
                key = self.construct_object(key_node)
                if key in lines:
                    raise MXError(
                        f"the key {key!r} is there twice, in lines {lines[key]} and {_line(key_node)}: keep one of them"
                    )
                lines[key] = _line(key_node)


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1
