"""Build HTML that is escaped by construction: text goes in as text, only what was built here goes in as markup."""

from html import escape


class Html(str):
    """Text that is markup already. Made by `element` and `raw`; every other str is escaped."""

    __slots__ = ()


def raw(markup: str) -> Html:
    """Our own markup, never anything that comes from a run."""
    return Html(markup)


def element(name: str, *children: object, **attributes: object) -> Html:
    """`element("p", "a < b", class_="quiet")`. None among children and attributes is left out; `_` becomes `-`."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>{joined(*children)}</{name}>")


def joined(*children: object) -> Html:
    return Html("".join(_child(child) for child in children))


def _child(child: object) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, list | tuple):
        return joined(*child)
    return escape(str(child), quote=True)


def table(headings: list[str], rows: list[list[object]], *, numbers: frozenset[str] = frozenset()) -> Html:
    """A table that scrolls by itself where the page is narrow. `numbers`: headings of right-aligned columns."""
    classes = ["number" if name in numbers else None for name in headings]
    head = [element("th", name, class_=kind, scope="col") for name, kind in zip(headings, classes, strict=True)]
    body = [
        element("tr", [element("td", cell, class_=kind) for cell, kind in zip(row, classes, strict=True)])
        for row in rows
    ]
    inner = element("table", element("thead", element("tr", head)), element("tbody", body))
    return element("div", inner, class_="scroll")
