"""Text of somebody else, as a terminal may be given it."""


def escaped(text: str, kept: str = "") -> str:
    """Returns the text without what could control a terminal: such characters are shown by their codes.

    Args:
        kept: characters that stay as they are, such as a newline.
    """
    return "".join(
        letter if letter.isprintable() or letter in kept else ascii(letter)[1:-1] for letter in text
    )
