"""Identify the language of texts, with models that ship inside their packages.

`py3langid` returns probabilities that can be compared with a threshold. `cld2` knows more
languages. `combined` runs both, accepts CLD2 only for languages that py3langid does not know, and
counts marker words of close languages. Only the beginning of a text is read, which costs little
accuracy and makes long pages cheap.

CLD2 is Chromium's compact language detector. It knows languages that py3langid lacks (Maori,
Tigrinya, Tswana, Tsonga and more) and is fast. Its scores are shares of a text, not probabilities.
Control characters, which it rejects, are replaced by spaces.

Close languages are distinguished by marker words that one has and the other has not. Marker words
are spellings, names of months and loan words, as grammars and dictionaries of the two list them.
The language with most of them wins; a draw keeps the identified language. Topical words are
excluded: a page about Zagreb is not Croatian because of that.

Serbian in Latin letters differs from Croatian and Bosnian by one vowel: `reka` where these have
`rijeka`. The old vowel yat became e in the standard Serbian of Serbia, and ije or je in Croatian
and Bosnian. A text with more words of the first kind than of the second is Serbian. The lists hold
no words of a topic, names or places. Serbian written with ije, as in Montenegro and Bosnia, has no
such mark and keeps its identified language. Slovene has e too, so only texts identified as Croatian
or Bosnian are tested."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple, assert_never

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llmsys.config.language import BAYES_CODES, LanguageConfig, normalize_language_code
from llmsys.data_pipeline.language.naive_bayes import load_naive_bayes_model

# Rejected by CLD2's input check: controls other than white space, and code points that are not
# characters.
_REJECTED = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_PLANE_ENDS = "".join(
    chr((plane << 16) + end) for plane in range(1, 17) for end in (0xFFFE, 0xFFFF)
)
_NO_CHARACTER = re.compile(f"[{_PLANE_ENDS}]")

UNKNOWN = "und"


class Cld2Result(NamedTuple):
    """CLD2's result for one text: code (`und` if unknown), share of the text in it, and whether
    CLD2 is sure.
    """

    code: str
    share: float
    sure: bool


def detect_languages(texts: Sequence[str]) -> list[Cld2Result]:
    """Detect languages by CLD2.

    Args:
        texts: The texts.

    Returns:
        The best guess for each.
    """
    return [_detect_language(text) for text in texts]


def _detect_language(text: str) -> Cld2Result:
    import pycld2

    clean = _NO_CHARACTER.sub(" ", _REJECTED.sub(" ", text))
    try:
        sure, _, languages = pycld2.detect(clean.encode(), isPlainText=True, bestEffort=True)
    except pycld2.error:
        return Cld2Result(UNKNOWN, 0.0, False)
    _, code, percent, _ = languages[0]
    return Cld2Result(UNKNOWN if code == "un" else code, percent / 100, bool(sure))


def list_cld2_codes() -> frozenset[str]:
    """Return the codes that CLD2 can return."""
    import pycld2

    codes = dict(pycld2.LANGUAGES)
    return frozenset(codes[name] for name in pycld2.DETECTED_LANGUAGES)


# Words, and stems that end with `*` and match every word that begins with them.
_MARKERS: Mapping[str, str] = {
    "ms": """
        kerana ialah iaitu syarikat bahawa manakala pelbagai isnin khamis jumaat ahad mac jun julai
        ogos disember wang
        pejabat polis kereta televisyen kewangan kanak lelaki awak encik puan nak sahaja selepas
        semasa sewaktu sukan
        bagaimanapun akhbar perlawanan jurulatih mesyuarat filem seramai tiada jurutera doktor
        peratus bilion berlaku
        sepanyol itali eropah perancis motosikal basikal teksi tandas bilik tingkap kerusi kasut
        seluar percuma seronok
        kelmarin esok petang sains perisian pautan laman daripada agensi maklumat pengurus
        perniagaan kedai hendaklah
        menerusi perkhidmatan kakitangan pasaran pelaburan pelancong* peguam mahkamah penyelidik*
        kemalangan kesihatan
        pesakit sijil peperiksaan cuti kerajaan universiti* kualiti* aktiviti* fakulti* identiti*
        kapasiti* komuniti*
        majoriti* minoriti* kuantiti* eksport import projek* objek* kontrak* telefon*
    """,
    "id": """
        karena yaitu bisa uang bahwa sedangkan berbagai senin kamis jumat maret juni juli agustus
        desember kantor polisi
        mobil televisi telepon keuangan manajer siswa pria olahraga pertandingan pelatih rapat
        dokter persen miliar
        prancis spanyol italia eropa sepeda kamar jendela kursi sepatu celana gratis kemarin besok
        sore situs unduh tapi
        nggak kapan warga butuh membutuhkan usai pemerintah* saat setelah provinsi kabupaten
        kecamatan penelitian
        peneliti kesehatan perusahaan karyawan pengacara pengadilan kecelakaan bandara pesawat
        liburan harus merilis
        dirilis merupakan terjadi menjadi banget kok udah diposting posting musik universitas*
        kualitas* aktivitas*
        fakultas* identitas* kapasitas* komunitas* mayoritas* minoritas* ekspor impor proyek*
        subyek* obyek*
    """,
    "hr": """
        tko netko nitko svatko itko tijekom uvjet* tisuć* glazb* sustav* siječanj siječnj* veljač*
        ožujk* ožujak
        travnj* travanj svibnj* svibanj lipnj* lipanj srpnj* srpanj kolovoz* rujan rujn* listopad*
        studeni studenog*
        prosinac prosinc* kazališ* zrakoplov* vlak* europ* tjedan tjedn* točk* točn* zemljopis*
        povijes* sveučiliš*
        tvrtk* poduzeć* ravnatelj* veleposlan* izvješć* priopć* suradn* surađ* sudjelov* unatoč
        gospodarst*
        gospodarsk* znanost* znanstven* uporab* računal* obitelj* obavijest* odvjetni* stupanj
        stupnj* razin* skupin*
        milijun* ubojst* djelatnik* nazoč* dužnosni* glasnogovorni* izbornik* momčad* natjec*
        natječ* proračun* dionic*
        tečaj* čimbeni* osobn* tisak tiskov* vlastit* županij* udrug* udruž* uvijek rabi* tvornic*
        kruh* žlic* rajčic*
        promet* kolodvor* predstojni* učinkovit* sukladno nogomet* srijed*
    """,
    "bs": """
        ko neko niko svako iko tokom takođe uslov* hiljad* muzik* sistem* januar* februar* mart
        marta martu april*
        maj maja maju juni juna juli jula august* avgust* septemb* oktob* novemb* decemb* pozorišt*
        avion* voz vozom
        vozov* evrop* sedmic* tačk* tačn* geografi* histori* univerzitet* preduzeć* kompanij*
        ambasad* izvještaj*
        saopć* saopšt* saradn* sarađ* učestv* uprkos privred* nauk* naučn* upotreb* kompjuter*
        porodic* advokat* stepen*
        nivo nivoa nivou grupa grupe grupi grupu milion* ubist* prisutn* zvanični* portparol* ekip*
        takmič* konkurs*
        budžet* akcij* faktor* ličn* štamp* sopstven* fabrik* hljeb* kašik* paradajz* saobraćaj*
        stanovniš*
        lahk* mehk* sahat* kahv* opšt* prečnik* bezbjedn* obezbijed* šta hemij*
    """,
}
GROUPS: Sequence[frozenset[str]] = (frozenset({"ms", "id"}), frozenset({"hr", "bs"}))


def count_marker_words(text: str, group: frozenset[str]) -> dict[str, int]:
    """Count the words of a text that only one of several similar languages has.

    Args:
        text: The text.
        group: Codes of similar languages.

    Returns:
        Marker words by language.
    """
    lower = text.lower()
    return {
        code: len(build_marker_pattern(_MARKERS[code]).findall(lower)) for code in sorted(group)
    }


@cache
def build_marker_pattern(markers_of_language: str) -> re.Pattern[str]:
    """Build a pattern of the words of a list, and of the words that begin with its stems (`*`)."""
    entries = markers_of_language.split()
    words = [entry for entry in entries if not entry.endswith("*")]
    stems = [entry[:-1] for entry in entries if entry.endswith("*")]
    return re.compile(rf"\b(?:(?:{'|'.join(words)})\b|(?:{'|'.join(stems)}))")


# Words, and stems that end with `*` and match every word that begins with them.
_EKAVIAN = """
    vreme mesto mesta mestu mestom mestima mestimi* dete deteta deca dece deci čovek* reč reči
    rečima pesma pesme
    pesmu pesnik* mleko mleka hleb* beo belo bele beli belog svet svetsk* reka reke reku rekom uvek
    gde ovde negde
    nigde videti videla videli živeo živela živeli živeti voleo volela umetn* deo delo dela delu
    delom delova delovi
    delove delimično delat* posle pre sledeć* sledi sledio usled nedelj* ponedeljak ponedeljk* cena
    cene cenu ceo celo
    cele celu celog cela lek lekar* lekov* predsedni* predsedava* sedišt* sever* mesec* zvezd*
    devojk* devojč* dečak*
    dečj* vest vesti savet* primer* promen* zamen* ocen* uspeh* uspeo uspela uspeli uspeva* uspešn*
    verovatn* veruje*
    verova* vernic* vera vere mera mere meru merenj* smer smera smeru telo tela telu telom obe dve
    reši* rešen* rešav*
    hteo htela hteli želeo želela želeli razume* odeljenj* odelj* podel* seća* oseća* osećanj* vek
    veka veku vekova
    levo leve levi levoj pobed* posed* poset* prelaz* predlog* predlož* prevod* preved* prevoz*
    sneg* vetar vetra lepo
    lepa lepe lepi lepot* izvešt* obavešt* svedo* nemač* nemci nemaca zahtev* poslednj* cvet*
    razmeš* premešt*
    smešten* mešavin* menja* promeni* primeni* primenj* deluj* delova* dejstv* beleg* beležn*
    zabelež* ubed* trpe*
    proceni* procenj* bezbedn* obezbe* nasled* sledstven* posled* istorij* istorijsk*
"""
_IJEKAVIAN = """
    vrijeme mjest* dijete djetet* djec* čovjek* riječ* pjesm* pjesni* mlijek* hljeb* bijel* svijet*
    svjetsk* rijek*
    uvijek gdje ovdje negdje nigdje vidje* vidio živje* živio volje* volio umjet* dio dijel* djel*
    poslije prije
    slijed* sljed* uslijed nedjelj* ponedjelj* cijen* cijel* cijeo lijek* liječ* ljekar* predsjed*
    sjed* sjever*
    mjesec* zvijezd* zvjezd* djevoj* dječ* vijest* savjet* primjer* primjen* promjen* zamjen*
    zamijen* ocjen* ocijen*
    uspje* uspio vjer* mjer* smjer* tijel* tjeles* obje dvije rješ* riješ* htje* htio željel* želio
    razumje* odjel*
    odijel* podijel* podjel* dodijel* sjeć* osjeć* osjet* vijek* vjek* lijev* pobjed* pobijed*
    posjed* posjet*
    prijelaz* prijedlog* prijevod* prijevoz* snijeg* vjet* lijep* ljep* izvješ* izvijest* obavješ*
    obavijest* svjedo*
    njema* nijem* zahtjev* zahtijev* posljed* cvijet* cvjet* razmješ* premješ* smješ* mješ* mijenj*
    mijen* promijen*
    primijen* djelov* bilje* zabilje* uvjer* procjen* procijen* bezbjed* obezbijed* naslijed*
    nasljed* sudjel* ljet*
    smije* trpje* unaprijed naprijed riječn* sjeme* sjest* tjedan tjedn* srijed* prijelom* također
    povijes*
"""


def find_serbian_share(text: str) -> float | None:
    """Estimate the share of Serbian words in a text in Latin letters, by their e where Croatian and
    Bosnian have ije.

    Args:
        text: The text.

    Returns:
        The share among words with either vowel (by Laplace); None if they are no majority.
    """
    lower = text.lower()
    ekavian, ijekavian = (
        len(build_marker_pattern(words).findall(lower)) for words in (_EKAVIAN, _IJEKAVIAN)
    )
    return (ekavian + 1) / (ekavian + ijekavian + 2) if ekavian > ijekavian else None


# py3langid does not mistake any language that only CLD2 knows for one of these with more than this
# probability.
_APART = "ar cs da de el en es fa fi fr he hu it ja ko nl pl pt ro ru sv th tr uk vi zh"
_UNMISTAKABLE = frozenset(_APART.split())
_SURE = 0.9

_Identified = tuple[list[str], npt.NDArray[np.float64]]


def identify_languages(texts: pa.Array, config: LanguageConfig) -> tuple[pa.Array, pa.Array]:
    """Identify the best language of each text.

    Args:
        texts: string or large_string without nulls.
        config: the identifier, and the number of characters to read.

    Returns:
        Codes as in `llmsys.config.language` (string) and probabilities (float32).
    """
    beginnings = [text[: config.max_characters] for text in texts.to_pylist()]
    match config.kind:
        case "py3langid":
            codes, scores = _identify_with_py3langid(beginnings)
        case "cld2":
            codes, scores = _identify_with_cld2(beginnings)
        case "combined":
            codes, scores = _identify_with_both(beginnings)
        case unreachable:
            assert_never(unreachable)
    return pa.array(codes, pa.string()), pa.array(scores, pa.float32())


def compute_keep_mask(codes: pa.Array, scores: pa.Array, config: LanguageConfig) -> pa.Array:
    """Mask the texts to keep: those in a wanted language with a probability above the minimum.

    Args:
        codes: string, from `identify_languages`.
        scores: float32, from `identify_languages`.
        config: the wanted languages (empty: all) and the minimum score.

    Returns:
        Boolean array.
    """
    sure = np.asarray(scores.to_numpy(zero_copy_only=False) > config.min_score)
    wanted = np.array(
        [not config.languages or code in config.languages for code in codes.to_pylist()], np.bool_
    )
    return pa.array(sure & wanted)


def _identify_with_py3langid(texts: Sequence[str]) -> _Identified:
    codes, scores = load_naive_bayes_model().predict_languages(texts)
    return [normalize_language_code(code) for code in codes], scores


def _identify_with_cld2(texts: Sequence[str]) -> _Identified:
    """Return CLD2's languages and shares of the text, halved where CLD2 is not sure."""
    found = detect_languages(texts)
    scores = np.array([result.share * (1 if result.sure else 0.5) for result in found], np.float64)
    return [normalize_language_code(result.code) for result in found], scores


def _identify_with_both(texts: Sequence[str]) -> _Identified:
    """Return py3langid's languages and probabilities; CLD2's where it names a language that
    py3langid does not know.

    CLD2 is skipped where py3langid is sure of a language that no such language is mistaken for.
    """
    codes, scores = _identify_with_py3langid(texts)
    asked = [
        number
        for number, code in enumerate(codes)
        if code not in _UNMISTAKABLE or scores[number] <= _SURE
    ]
    for number, code, score in zip(
        asked, *_identify_with_cld2([texts[number] for number in asked]), strict=True
    ):
        if code not in BAYES_CODES and code != UNKNOWN:
            codes[number] = code
            scores[number] = score
    for group in GROUPS:
        _resolve_similar_languages(texts, codes, scores, group)
    _find_latin_serbian(texts, codes, scores)
    return codes, scores


_ASKED = frozenset({"hr", "bs"})
# py3langid divides the probability of such a text among these
_LATIN_SERBIAN = frozenset({"sr", "hr", "bs", "sl"})


def _find_latin_serbian(
    texts: Sequence[str], codes: list[str], scores: npt.NDArray[np.float64]
) -> None:
    """Correct the codes of Serbian texts in Latin letters; scores as in
    `_resolve_similar_languages`.
    """
    for number, code in enumerate(codes):
        if code not in _ASKED:
            continue

        share = find_serbian_share(texts[number])
        if share is not None:
            in_group = float(
                load_naive_bayes_model().compute_probability([texts[number]], _LATIN_SERBIAN)[0]
            )
            codes[number] = "sr"
            scores[number] = in_group * share


def _resolve_similar_languages(
    texts: Sequence[str], codes: list[str], scores: npt.NDArray[np.float64], group: frozenset[str]
) -> None:
    """Choose between the languages of a group by marker words.

    The score is the probability of the group times the language's share of the marker words
    (Laplace's rule of succession), or py3langid's probability if that is larger.
    """
    asked = [number for number, code in enumerate(codes) if code in group]
    sure = load_naive_bayes_model().compute_probability([texts[number] for number in asked], group)
    for number, in_group in zip(asked, sure.tolist(), strict=True):
        found = count_marker_words(texts[number], group)
        # A draw keeps the identified language.
        best = max(found, key=lambda code: (found[code], code == codes[number]))
        share = (found[best] + 1) / (sum(found.values()) + 2)
        least = scores[number] if best == codes[number] else 0.0
        codes[number] = best
        scores[number] = max(least, in_group * share)
