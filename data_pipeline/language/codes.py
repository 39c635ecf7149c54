"""One code per language, whatever the identifier calls it.

Codes are ISO 639-1 where it has one and ISO 639-3 otherwise. nb and nn are distinct; `no`, which both identifiers use
for Bokmål as opposed to nn, becomes nb. Traditional and simplified Chinese are both zh.
"""

CODE_OF = {
    "no": "nb",
    "iw": "he",
    "in": "id",
    "jw": "jv",
    "mo": "ro",
    "sh": "sr",
    "zh-Hant": "zh",
}

# The codes that each identifier can return. Listed here to reject a wrong code before the slow models are loaded.
_BAYES = """
ace af am an ar ary arz as az ba bcl be bg bn br bs ca crh cs cy da de dz el en eo es et eu ext fa fi fo fr fuv
fy ga gcf gcr gd gl gom grc gu gug guw ha hbo he hi hr ht hu hy id ig is it ja jv ka kab kik kk km kn ko ku ky
la lb lg lij ln lo lt ltg lv mg mk ml mn mr ms mt my nb ne nl nn nso oc om or pa pcm pl ps pt qu ro ru rw sa sdh
se si sk sl sn so sq sr st sv sw ta te tg th tk tl tr tt ug uk ur uz uzs vec vi vo wa wuu xh yo yue zh zu zxx
"""
_COMPACT = """
aa ab af ak am ar as ay az ba be bg bh bi bn bo br bs ca ceb chr co crs cs cy da de dv dz el en eo es et eu fa
fi fj fo fr fy ga gd gl gn gu gv ha haw he hi hmn hr ht hu hy ia id ie ig ik is it iu ja jv ka kha kk kl km kn
ko ks ku ky la lb lg lif ln lo lt lv mfe mg mi mk ml mn mr ms mt my na nb ne nl nn nr nso ny oc om or pa pl ps
pt qu rm rn ro ru rw sa sco sd sg si sk sl sm sn so sq sr ss st su sv sw syr ta te tg th ti tk tl tlh tn to tr
ts tt ug uk ur uz ve vi vo war wo xh xx-Bugi xx-Goth yi yo za zh zu zzp
"""

BAYES_CODES = frozenset(_BAYES.split())
COMPACT_CODES = frozenset(_COMPACT.split())


def normalize_language_code(code: str) -> str:
    """Return the pipeline's code for an identifier's label."""
    return CODE_OF.get(code, code)


def list_known_codes(kind: str) -> frozenset[str]:
    """List the codes that an identifier can return.

    Args:
        kind: `py3langid`, `cld2` or `combined`.

    Returns:
        Codes, without `und` (unknown).
    """
    return {"py3langid": BAYES_CODES, "cld2": COMPACT_CODES}.get(kind, BAYES_CODES | COMPACT_CODES)
