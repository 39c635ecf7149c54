"""Laws of charsets: what a page is written in is found by its content, whatever header and meta
element say.
"""

import pytest

from llmsys.data_pipeline.readers.charset import detect_charset

# Article 1 of the Universal Declaration of Human Rights.
TEXTS = {
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft "
    "und Gewissen begabt und sollen einander im Geiste der Brüderlichkeit begegnen. Für "
    "Überzeugungen dürfen sie nicht größer benachteiligt werden.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont "
    "doués de raison et de conscience et doivent agir les uns envers les autres dans un "
    "esprit de fraternité. Voilà ce que déclare l’assemblée.",
    "pl": "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw. Są oni "
    "obdarzeni rozumem i sumieniem i powinni postępować wobec innych w duchu braterstwa.",
    "cs": "Všichni lidé rodí se svobodní a sobě rovní co do důstojnosti a práv. Jsou nadáni "
    "rozumem a svědomím a mají spolu jednat v duchu bratrství.",
    "hu": "Minden emberi lény szabadon születik és egyenlő méltósága és joga van. Az emberek, "
    "ésszel és lelkiismerettel bírván, egymással szemben testvéri szellemben kell hogy "
    "viseltessenek. Művelődő közösségük jövője közös ügyük.",
    "ru": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены "
    "разумом и совестью и должны поступать в отношении друг друга в духе братства.",
    "uk": "Всі люди народжуються вільними і рівними у своїй гідності та правах. Вони наділені "
    "розумом і совістю і повинні діяти у відношенні один до одного в дусі братерства. Її "
    "власність захищена.",
    "bg": "Всички хора се раждат свободни и равни по достойнство и права. Те са надарени с разум "
    "и съвест и следва да се отнасят помежду си в дух на братство.",
    "el": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα. "
    "Είναι προικισμένοι με λογική και συνείδηση, και οφείλουν να συμπεριφέρονται μεταξύ τους "
    "με πνεύμα αδελφοσύνης.",
    "tr": "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar. Akıl ve vicdana "
    "sahiptirler ve birbirlerine karşı kardeşlik zihniyeti ile hareket etmelidirler.",
    "he": "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם. כולם חוננו בתבונה ובמצפון, לפיכך "
    "חובה עליהם לנהוג איש ברעהו ברוח של אחווה.",
    "ar": "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق. وقد وهبوا عقلا وضميرا وعليهم أن "
    "يعامل بعضهم بعضا بروح الإخاء.",
    "lt": "Visi žmonės gimsta laisvi ir lygūs savo orumu ir teisėmis. Jiems suteiktas protas ir "
    "sąžinė ir jie turi elgtis vienas kito atžvilgiu kaip broliai. Šių teisių užtikrinimas "
    "yra mūsų visų pareiga.",
    "th": (
        "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ต่างมีเหตุผลและมโนธรรม "
        "และควรปฏิบัติต่อกันด้วยเจตนารมณ์แห่งภราดรภาพ"
    ),
    "ja": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。人間は、理性"
    "と良心とを授けられており、互いに同胞の精神をもって行動しなければならない。",
    "zh": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。这是一个关"
    "于编码的网页，用来试验。",
    "tw": "人人生而自由，在尊嚴和權利上一律平等。他們賦有理性和良心，並應以兄弟關係的精神相對待。這是一個關"
    "於編碼的網頁，用來試驗。",
    "ko": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 인간은 천부적으로 이성과 양"
    "심을 부여받았으며 서로 형제애의 정신으로 행동하여야 한다.",
}
REAL = {
    "de": [
        "cp1252",
        "iso8859-1",
        "iso8859-15",
        "mac_roman",
        "cp850",
        "utf-16-le",
        "utf-16-be",
        "utf-32-le",
    ],
    "fr": ["cp1252", "iso8859-1", "mac_roman"],
    "pl": ["cp1250", "iso8859-2"],
    "cs": ["cp1250", "iso8859-2"],
    "hu": ["cp1250", "iso8859-2"],
    "ru": [
        "cp1251",
        "koi8-r",
        "cp866",
        "mac_cyrillic",
        "iso8859-5",
        "utf-16-be",
        "utf-32",
        "utf-32-le",
    ],
    "uk": ["cp1251", "koi8-u"],
    "bg": ["cp1251", "iso8859-5"],
    "el": ["cp1253", "iso8859-7"],
    "tr": ["cp1254", "iso8859-9"],
    "he": ["cp1255", "iso8859-8"],
    "ar": ["cp1256", "iso8859-6"],
    "lt": ["cp1257", "iso8859-13", "iso8859-4"],
    "th": ["cp874", "iso8859-11", "utf-16-be"],
    "ja": ["cp932", "euc_jp", "iso2022_jp", "utf-16-le", "utf-16-be", "utf-32-be"],
    "zh": ["gb2312", "gbk", "gb18030", "hz", "utf-16-be", "utf-8"],
    "tw": ["big5", "big5hkscs"],
    "ko": ["euc_kr", "cp949", "johab", "iso2022_kr", "utf-8"],
}
WRONG = [
    "utf-8",
    "iso-8859-1",
    "windows-1252",
    "windows-1251",
    "shift_jis",
    "gbk",
    "koi8-r",
    "no-such-charset",
    "",
]
CASES = [(language, codec) for language, codecs in REAL.items() for codec in codecs]


@pytest.mark.parametrize(("language", "codec"), CASES, ids=lambda value: value)
def test_a_wrong_header_or_meta_element_does_not_change_what_is_read(
    language: str, codec: str
) -> None:
    for wrong in WRONG:
        for meta in ("", f'<meta charset="{wrong}">', f'<meta charset="{codec}">'):
            html = (
                f"<html><head>{meta}<title>x</title></head><body>"
                + f"<p>{TEXTS[language]}</p>" * 3
                + "</body></html>"
            )
            payload = html.encode(codec, "ignore")
            found = detect_charset(payload, wrong)
            read = payload.decode(found, "replace").lstrip("\ufeff")
            assert read == payload.decode(codec).lstrip("\ufeff"), (wrong, meta, found)


def test_at_least_forty_charsets_are_told_apart() -> None:
    assert len({codec for _, codec in CASES}) >= 40


@pytest.mark.parametrize(
    ("payload", "header", "found"),
    [
        (b"<p>plain ASCII</p>", "shift_jis", "utf-8"),
        (b"<p>~{ braces and tildes ~}</p>", "", "utf-8"),
        (b"<p>one caf\xe9</p>", "", "cp1252"),
        ("<p>一个</p>".encode("gbk"), "gb2312", "gb18030"),
        (b"", "", "utf-8"),
        (b"<p>\xe9</p>", "undefined", "cp1252"),
        (b"<p>\xe9</p>", "base64", "cp1252"),
    ],
)
def test_little_evidence_leaves_it_to_the_header(payload: bytes, header: str, found: str) -> None:
    assert detect_charset(payload, header) == found


@pytest.mark.parametrize(
    "label", ["\0", "utf-8\0", "gbk\0x", "\udcff", "x" * 100_000, "../hex", "idna", "a b", "\n"]
)
def test_no_label_of_a_server_raises(label: str) -> None:
    page = "<html><body><p>Größere Städte führen über schöne Brücken.</p>"
    assert page.encode("cp1252").decode(detect_charset(page.encode("cp1252"), label)) == page


def test_a_hungarian_page_without_a_claim_is_not_western() -> None:
    for text in (
        "Tűrő a nő, és öt éve él így.",
        "Az ő fülébe súgott, s úgy örült a hűvös estének.",
    ):
        for codec in ("cp1250", "iso8859-2"):
            assert text.encode(codec).decode(detect_charset(text.encode(codec), "")) == text
    for text in (
        "Põhja-Eesti väikõnõ jõgi üle öö",
        "Não põe à mesa pão nem coração",
        "Où êtes-vous sûr d’être français",
    ):
        assert text.encode("cp1252").decode(detect_charset(text.encode("cp1252"), "")) == text
