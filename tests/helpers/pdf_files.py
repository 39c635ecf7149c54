"""PDF files made of bytes: usual ones, encrypted ones, and ones that are made to break readers."""

import hashlib
import zlib
from collections.abc import Mapping, Sequence

_PADDING = bytes.fromhex("28BF4E5E4E758A4164004E56FFFA01082E2E00B6D0683E802F0CA9FE6453697A")
_ID = b"0123456789abcdef"
FONT = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
PAGE = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R /Resources %d 0 R >>"


def format_stream(content: bytes, keys: bytes = b"", *, is_packed: bool = True) -> bytes:
    """A stream, compressed or not."""
    packed = zlib.compress(content, 9) if is_packed else content
    name = b" /Filter /FlateDecode" if is_packed else b""
    return b"<< /Length %d%s%s >>\nstream\n%s\nendstream" % (len(packed), name, keys, packed)


def build_file(objects: Mapping[int, bytes], trailer: bytes = b"") -> bytes:
    """A file of numbered objects with its table; 1 is the catalog."""
    content = bytearray(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n")
    places = {}
    for number, body in objects.items():
        places[number] = len(content)
        content += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(content)
    most = max(objects) + 1
    content += b"xref\n0 %d\n0000000000 65535 f \n" % most
    for number in range(1, most):
        content += b"%010d 00000 %s \n" % (
            places.get(number, 0),
            b"n" if number in places else b"f",
        )
    content += b"trailer\n<< /Size %d /Root 1 0 R %s >>\nstartxref\n%d\n%%%%EOF\n" % (
        most, trailer, start,
    )  # fmt: skip
    return bytes(content)


def format_text(text: str) -> bytes:
    """The operators that show lines of text."""
    lines = [line.replace("\\", r"\\").replace("(", r"\(") for line in text.split("\n")]
    lines = [line.replace(")", r"\)") for line in lines]
    shown = b" T* ".join(b"(%s) Tj" % line.encode("cp1252") for line in lines)
    return b"BT /F1 12 Tf 14 TL 40 740 Td %s ET" % shown


def build_objects(contents: Sequence[bytes], resources: bytes = b"") -> dict[int, bytes]:
    """The objects of a file with these streams as pages."""
    kids = b" ".join(b"%d 0 R" % (10 + 2 * number) for number in range(len(contents)))
    objects = {
        1: b"<< /Type /Catalog /Pages 2 0 R >>",
        2: b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(contents)),
        3: b"<< /Font << /F1 4 0 R >> %s >>" % resources,
        4: FONT,
    }
    for number, content in enumerate(contents):
        objects[10 + 2 * number] = PAGE % (11 + 2 * number, 3)
        objects[11 + 2 * number] = content
    return objects


def build_pdf(*pages: str) -> bytes:
    """A file with a text on each page."""
    return build_file(build_objects([format_stream(format_text(page)) for page in pages]))


def _encrypt(key: bytes, content: bytes) -> bytes:
    """RC4."""
    state = list(range(256))
    other = 0
    for number in range(256):
        other = (other + state[number] + key[number % len(key)]) % 256
        state[number], state[other] = state[other], state[number]
    one = other = 0
    found = bytearray()
    for byte in content:
        one = (one + 1) % 256
        other = (other + state[one]) % 256
        state[one], state[other] = state[other], state[one]
        found.append(byte ^ state[(state[one] + state[other]) % 256])
    return bytes(found)


def build_encrypted_pdf(text: str, password: bytes, permissions: int) -> bytes:
    """A file with 40 bits of RC4 (ISO 32000-1, 7.6.3) that opens with a password."""
    padded = (password + _PADDING)[:32]
    owner = _encrypt(hashlib.md5((b"owner" + _PADDING)[:32]).digest()[:5], padded)
    allowed = permissions.to_bytes(4, "little", signed=True)
    key = hashlib.md5(padded + owner + allowed + _ID).digest()[:5]
    salted = key + (11).to_bytes(3, "little") + bytes(2)
    stream = _encrypt(hashlib.md5(salted).digest()[:10], format_text(text))
    objects = build_objects([format_stream(stream, is_packed=False)])
    objects[5] = b"<< /Filter /Standard /V 1 /R 2 /P %d /O <%s> /U <%s> >>" % (
        permissions, owner.hex().encode(), _encrypt(key, _PADDING).hex().encode(),
    )  # fmt: skip
    name = _ID.hex().encode()
    return build_file(objects, b"/Encrypt 5 0 R /ID [<%s> <%s>]" % (name, name))


def build_bomb(decoded_bytes: int) -> bytes:
    """A page whose operators take many times the bytes of the file."""
    operators = b"BT /F1 12 Tf (words of a page) Tj ET "
    return build_file(build_objects([format_stream(operators * (decoded_bytes // len(operators)))]))


def build_nested_forms(depth: int, calls: int) -> bytes:
    """A page that shows a form, which shows another `calls` times, and so on."""
    objects = build_objects([format_stream(b"/X0 Do")], b"/XObject << /X0 100 0 R >>")
    for number in range(depth):
        keys = (
            b" /Type /XObject /Subtype /Form /BBox [0 0 612 792] /Resources << /Font << /F1 4 0 R "
            b">> /XObject << /X%d %d 0 R >> >>" % (number + 1, 101 + number)
        )
        inner = b"/X%d Do " % (number + 1) * calls if number + 1 < depth else format_text("deep")
        objects[100 + number] = format_stream(inner, keys)
    return build_file(objects)


def build_page_tree(depth: int, *, is_cyclic: bool) -> bytes:
    """A tree of one page below many nodes, or whose last node is its first."""
    objects = build_objects([format_stream(format_text("a page"))])
    objects[2] = b"<< /Type /Pages /Kids [100 0 R] /Count 1 >>"
    for number in range(depth):
        last = b"2 0 R" if is_cyclic else b"10 0 R"
        kid = b"%d 0 R" % (101 + number) if number + 1 < depth else last
        objects[100 + number] = b"<< /Type /Pages /Kids [%s] /Count 1 >>" % kid
    return build_file(objects)
