"""The text of a chat template, in Jinja, and its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateSyntaxError, meta, nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

from mrlm_pl.errors import ConfigurationError, PolicyError, did_you_mean

PLAIN_TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}{{ message['role'].capitalize() }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)
"""The template of models without one: ``Role: content`` lines, an assistant line closed by the EOS token."""

_GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}


def checked_template(template: str) -> str:
    """Return the template if it is Jinja.

    Raises:
        PolicyError: it is not.
    """
    if "{" not in template:
        raise PolicyError(f'chat_template {template!r:.120} is no Jinja template; give its text, such as "$(cat FILE)"')
    try:
        _compile_jinja_template(template)
    except TemplateSyntaxError as error:
        raise PolicyError(
            f"chat_template {template[:40]!r} is no Jinja template: line {error.lineno}: {error}"
        ) from error
    return template


def template_variables(template: str) -> list[str]:
    """Return the names of the arguments that a template reads, except the conversation, the tools and special tokens.

    >>> template_variables("{% set a = 1 %}{{ messages }}{{ a }}{% if enable_thinking is defined %}{% endif %}")
    ['enable_thinking']
    """
    environment = _compile_jinja_template(template).environment
    parsed = environment.parse(template)
    names = [(name.name, name.ctx) for name in parsed.find_all(nodes.Name)]
    checks = [*parsed.find_all(nodes.Test), *parsed.find_all(nodes.Filter)]
    tested = {
        check.node.name
        for check in checks
        if check.name in ("defined", "undefined", "default") and isinstance(check.node, nodes.Name)
    }
    assigned = {name for name, context in names if context == "store"} - tested
    variables = meta.find_undeclared_variables(parsed) - assigned - set(environment.globals) - _GIVEN
    return sorted(name for name in variables if not name.endswith("_token"))


def with_arguments(template: str, arguments: Mapping[str, Any], model: str) -> str:
    r"""Return a template with these values for its arguments, for all callers that render it.

    Args:
        template: template in Jinja.
        arguments: values by name, such as ``{"enable_thinking": False}``.
        model: name of the model, for messages.

    Raises:
        ConfigurationError: the template does not read an argument.

    >>> with_arguments("{{ enable_thinking }}", {"enable_thinking": False}, "m")
    '{% if enable_thinking is not defined %}{% set enable_thinking = False %}{% endif %}\n{{ enable_thinking }}'
    """
    if not arguments:
        return template
    variables = template_variables(template)
    for name in arguments:
        if name not in variables:
            raise ConfigurationError(
                f"model {model!r}: chat_template_kwargs has {name!r}, which its chat template does not read; "
                + did_you_mean(name, variables, f"it reads {variables or 'none'}")
            )
    sets = (
        f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
        for name, value in arguments.items()
    )
    return checked_template("".join(sets) + "\n" + template)  # Jinja takes the newline off
