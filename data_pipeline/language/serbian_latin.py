"""Distinguish Serbian in Latin letters from Croatian and Bosnian by one vowel: `reka` where these have `rijeka`.

The old vowel yat became e in the standard Serbian of Serbia, and ije or je in Croatian and Bosnian. A text with more
words of the first kind than of the second is Serbian. The lists hold no words of a topic, names or places. Serbian
written with ije, as in Montenegro and Bosnia, has no such mark and keeps its identified language. Slovene has e too, so
only texts identified as Croatian or Bosnian are tested.
"""

from data_pipeline.language.similar_languages import build_marker_pattern

# Words, and stems that end with `*` and match every word that begins with them.
_EKAVIAN = """
    vreme mesto mesta mestu mestom mestima mestimi* dete deteta deca dece deci čovek* reč reči rečima pesma pesme
    pesmu pesnik* mleko mleka hleb* beo belo bele beli belog svet svetsk* reka reke reku rekom uvek gde ovde negde
    nigde videti videla videli živeo živela živeli živeti voleo volela umetn* deo delo dela delu delom delova delovi
    delove delimično delat* posle pre sledeć* sledi sledio usled nedelj* ponedeljak ponedeljk* cena cene cenu ceo celo
    cele celu celog cela lek lekar* lekov* predsedni* predsedava* sedišt* sever* mesec* zvezd* devojk* devojč* dečak*
    dečj* vest vesti savet* primer* promen* zamen* ocen* uspeh* uspeo uspela uspeli uspeva* uspešn* verovatn* veruje*
    verova* vernic* vera vere mera mere meru merenj* smer smera smeru telo tela telu telom obe dve reši* rešen* rešav*
    hteo htela hteli želeo želela želeli razume* odeljenj* odelj* podel* seća* oseća* osećanj* vek veka veku vekova
    levo leve levi levoj pobed* posed* poset* prelaz* predlog* predlož* prevod* preved* prevoz* sneg* vetar vetra lepo
    lepa lepe lepi lepot* izvešt* obavešt* svedo* nemač* nemci nemaca zahtev* poslednj* cvet* razmeš* premešt*
    smešten* mešavin* menja* promeni* primeni* primenj* deluj* delova* dejstv* beleg* beležn* zabelež* ubed* trpe*
    proceni* procenj* bezbedn* obezbe* nasled* sledstven* posled* istorij* istorijsk*
"""
_IJEKAVIAN = """
    vrijeme mjest* dijete djetet* djec* čovjek* riječ* pjesm* pjesni* mlijek* hljeb* bijel* svijet* svjetsk* rijek*
    uvijek gdje ovdje negdje nigdje vidje* vidio živje* živio volje* volio umjet* dio dijel* djel* poslije prije
    slijed* sljed* uslijed nedjelj* ponedjelj* cijen* cijel* cijeo lijek* liječ* ljekar* predsjed* sjed* sjever*
    mjesec* zvijezd* zvjezd* djevoj* dječ* vijest* savjet* primjer* primjen* promjen* zamjen* zamijen* ocjen* ocijen*
    uspje* uspio vjer* mjer* smjer* tijel* tjeles* obje dvije rješ* riješ* htje* htio željel* želio razumje* odjel*
    odijel* podijel* podjel* dodijel* sjeć* osjeć* osjet* vijek* vjek* lijev* pobjed* pobijed* posjed* posjet*
    prijelaz* prijedlog* prijevod* prijevoz* snijeg* vjet* lijep* ljep* izvješ* izvijest* obavješ* obavijest* svjedo*
    njema* nijem* zahtjev* zahtijev* posljed* cvijet* cvjet* razmješ* premješ* smješ* mješ* mijenj* mijen* promijen*
    primijen* djelov* bilje* zabilje* uvjer* procjen* procijen* bezbjed* obezbijed* naslijed* nasljed* sudjel* ljet*
    smije* trpje* unaprijed naprijed riječn* sjeme* sjest* tjedan tjedn* srijed* prijelom* također povijes*
"""


def find_serbian_share(text: str) -> float | None:
    """Return the share of Serbian words among those with either vowel (by Laplace), None if they are no majority."""
    lower = text.lower()
    ekavian, ijekavian = (len(build_marker_pattern(words).findall(lower)) for words in (_EKAVIAN, _IJEKAVIAN))
    return (ekavian + 1) / (ekavian + ijekavian + 2) if ekavian > ijekavian else None
