"""What a chat template says about the content of messages."""

import jinja2
import jinja2.ext

_MEDIA = ("image", "audio", "video", "vision")
_LOOP_NAMES = ("message", "msg", "m")


def takes_parts(template: str | None) -> bool:
    """Whether a chat template goes through the parts of a message's content, found as SGLang finds it."""
    if template is None:
        return False
    if any(word in template for word in _MEDIA):
        return True
    try:
        tree = jinja2.Environment(extensions=[jinja2.ext.loopcontrols]).parse(template)
    except jinja2.TemplateError:
        return False
    return any(_is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))


def _is_content(node: jinja2.nodes.Node) -> bool:
    while isinstance(node, jinja2.nodes.Filter | jinja2.nodes.Test | jinja2.nodes.Getitem):
        if isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Const):
            return node.arg.value == "content" and _is_message(node.node)
        if node.node is None:
            return False
        node = node.node
    return isinstance(node, jinja2.nodes.Getattr) and node.attr == "content" and _is_message(node.node)


def _is_message(node: jinja2.nodes.Node) -> bool:
    return isinstance(node, jinja2.nodes.Name) and node.name in _LOOP_NAMES
