"""Distinguish languages so close that identifiers guess, by marker words that one has and the other has not.

Marker words are spellings, names of months and loan words, as grammars and dictionaries of the two list them. The
language with most of them wins; a draw keeps the identified language. Topical words are excluded: a page about Zagreb
is not Croatian because of that.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache

# Words, and stems that end with `*` and match every word that begins with them.
_MARKERS: Mapping[str, str] = {
    "ms": """
        kerana ialah iaitu syarikat bahawa manakala pelbagai isnin khamis jumaat ahad mac jun julai ogos disember wang
        pejabat polis kereta televisyen kewangan kanak lelaki awak encik puan nak sahaja selepas semasa sewaktu sukan
        bagaimanapun akhbar perlawanan jurulatih mesyuarat filem seramai tiada jurutera doktor peratus bilion berlaku
        sepanyol itali eropah perancis motosikal basikal teksi tandas bilik tingkap kerusi kasut seluar percuma seronok
        kelmarin esok petang sains perisian pautan laman daripada agensi maklumat pengurus perniagaan kedai hendaklah
        menerusi perkhidmatan kakitangan pasaran pelaburan pelancong* peguam mahkamah penyelidik* kemalangan kesihatan
        pesakit sijil peperiksaan cuti kerajaan universiti* kualiti* aktiviti* fakulti* identiti* kapasiti* komuniti*
        majoriti* minoriti* kuantiti* eksport import projek* objek* kontrak* telefon*
    """,
    "id": """
        karena yaitu bisa uang bahwa sedangkan berbagai senin kamis jumat maret juni juli agustus desember kantor polisi
        mobil televisi telepon keuangan manajer siswa pria olahraga pertandingan pelatih rapat dokter persen miliar
        prancis spanyol italia eropa sepeda kamar jendela kursi sepatu celana gratis kemarin besok sore situs unduh tapi
        nggak kapan warga butuh membutuhkan usai pemerintah* saat setelah provinsi kabupaten kecamatan penelitian
        peneliti kesehatan perusahaan karyawan pengacara pengadilan kecelakaan bandara pesawat liburan harus merilis
        dirilis merupakan terjadi menjadi banget kok udah diposting posting musik universitas* kualitas* aktivitas*
        fakultas* identitas* kapasitas* komunitas* mayoritas* minoritas* ekspor impor proyek* subyek* obyek*
    """,
    "hr": """
        tko netko nitko svatko itko tijekom uvjet* tisuć* glazb* sustav* siječanj siječnj* veljač* ožujk* ožujak
        travnj* travanj svibnj* svibanj lipnj* lipanj srpnj* srpanj kolovoz* rujan rujn* listopad* studeni studenog*
        prosinac prosinc* kazališ* zrakoplov* vlak* europ* tjedan tjedn* točk* točn* zemljopis* povijes* sveučiliš*
        tvrtk* poduzeć* ravnatelj* veleposlan* izvješć* priopć* suradn* surađ* sudjelov* unatoč gospodarst*
        gospodarsk* znanost* znanstven* uporab* računal* obitelj* obavijest* odvjetni* stupanj stupnj* razin* skupin*
        milijun* ubojst* djelatnik* nazoč* dužnosni* glasnogovorni* izbornik* momčad* natjec* natječ* proračun* dionic*
        tečaj* čimbeni* osobn* tisak tiskov* vlastit* županij* udrug* udruž* uvijek rabi* tvornic* kruh* žlic* rajčic*
        promet* kolodvor* predstojni* učinkovit* sukladno nogomet* srijed*
    """,
    "bs": """
        ko neko niko svako iko tokom takođe uslov* hiljad* muzik* sistem* januar* februar* mart marta martu april*
        maj maja maju juni juna juli jula august* avgust* septemb* oktob* novemb* decemb* pozorišt* avion* voz vozom
        vozov* evrop* sedmic* tačk* tačn* geografi* histori* univerzitet* preduzeć* kompanij* ambasad* izvještaj*
        saopć* saopšt* saradn* sarađ* učestv* uprkos privred* nauk* naučn* upotreb* kompjuter* porodic* advokat* stepen*
        nivo nivoa nivou grupa grupe grupi grupu milion* ubist* prisutn* zvanični* portparol* ekip* takmič* konkurs*
        budžet* akcij* faktor* ličn* štamp* sopstven* fabrik* hljeb* kašik* paradajz* saobraćaj* stanovniš*
        lahk* mehk* sahat* kahv* opšt* prečnik* bezbjedn* obezbijed* šta hemij*
    """,
}
GROUPS: Sequence[frozenset[str]] = (frozenset({"ms", "id"}), frozenset({"hr", "bs"}))


def count_marker_words(text: str, group: frozenset[str]) -> dict[str, int]:
    """Count the marker words of each language of a group in a text."""
    lower = text.lower()
    return {code: len(build_marker_pattern(_MARKERS[code]).findall(lower)) for code in sorted(group)}


@cache
def build_marker_pattern(markers_of_language: str) -> re.Pattern[str]:
    """Build a pattern of the words of a list, and of the words that begin with its stems (`*`)."""
    entries = markers_of_language.split()
    words = [entry for entry in entries if not entry.endswith("*")]
    stems = [entry[:-1] for entry in entries if entry.endswith("*")]
    return re.compile(rf"\b(?:(?:{'|'.join(words)})\b|(?:{'|'.join(stems)}))")
