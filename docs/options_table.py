"""Prints the tables of docs/configuration.md; a test compares them."""

from cloudckpt.config import (
    AzureOptions,
    BackgroundOptions,
    Config,
    GCSOptions,
    RetryPolicy,
    S3Options,
    documented_options,
)


def tables() -> str:
    """The tables in Markdown."""
    lines: list[str] = []
    for cls in (Config, RetryPolicy, BackgroundOptions, S3Options, GCSOptions, AzureOptions):
        lines += [f"## {cls.__name__}", "", "| option | variable | default | meaning |"]
        lines += ["|---|---|---|---|"]
        for name, variable, default, meaning in documented_options(cls):
            lines.append(f"| `{name}` | `{variable}` | `{default!r}` | {meaning} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables(), end="")
