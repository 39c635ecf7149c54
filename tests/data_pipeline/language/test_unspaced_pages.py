"""Laws of pages in Japanese, Korean and Thai: prose stays under the shipped profiles, and what no
one wants to read
goes for a stated reason. test_chinese.py has those of Chinese.
"""

import pyarrow as pa
import pytest

from llmsys.config.data import CrawlConfig
from llmsys.config.language import parse_language_rules
from llmsys.data_pipeline.language.rules_by_language import serialize_rules_by_language
from llmsys.data_pipeline.rules.language_chains import LanguageRuleChains

KINDS = ("native_text", "gopher_repetition", "fineweb_quality", "gopher_quality")

PROSE = {
    "ja": """春になると、村の人々は川のそばに集まって花を見る。子どもたちは木の下で遊び、年寄りは昔の話をした。
祖父は若いころ、遠い町で船を作る仕事をしていたという。朝早く起きて、暗くなるまで働いたそうだ。
町には大きな市場があり、魚や野菜が毎日運ばれてきた。値段は安かったが、冬には品物が少なくなった。
ある年の夏に大雨が降り、橋が流されてしまった。人々は舟で川を渡り、新しい橋ができるまで三年待った。
今では道も広くなり、車で一時間もかからずに行くことができる。それでも祖父は、歩いた道が懐かしいと言う。""",
    "ko": """봄이 오면 마을 사람들은 강가에 모여 꽃을 구경하고 이야기를 나누었다.
아이들은 나무 아래에서 놀고 노인들은 옛날 일을 말했다.
할아버지는 젊었을 때 먼 도시에서 배를 만드는 일을 했다고 한다.
아침 일찍 일어나 어두워질 때까지 일했고 쉬는 날은 거의 없었다.
그 도시에는 큰 시장이 있어서 생선과 채소가 날마다 들어왔다. 값은 쌌지만 겨울이 되면 물건이 많이 줄어들었다.
어느 해 여름에는 비가 너무 많이 내려 다리가 떠내려갔다.
사람들은 배를 타고 강을 건넜고 새 다리가 생길 때까지 세 해를 기다렸다.
지금은 길도 넓어지고 자동차로 한 시간이면 갈 수 있다. 그래도 할아버지는 걸어 다니던 그 길이 그립다고 말한다.""",
    "th": """เมื่อถึงฤดูใบไม้ผลิ ชาวบ้านจะมารวมตัวกันที่ริมแม่น้ำเพื่อชมดอกไม้
เด็ก ๆ เล่นกันใต้ต้นไม้ ส่วนคนแก่ก็เล่าเรื่องเก่าให้ฟัง
คุณปู่เล่าว่าตอนที่ยังหนุ่มนั้นเคยทำงานต่อเรืออยู่ในเมืองที่ห่างไกล
ต้องตื่นแต่เช้าและทำงานจนมืดค่ำแทบไม่มีวันหยุด
ในเมืองมีตลาดใหญ่ซึ่งมีปลาและผักเข้ามาขายทุกวัน ราคาไม่แพงนัก แต่พอถึงฤดูหนาวของก็มีน้อยลงไปมาก
มีปีหนึ่งฝนตกหนักจนสะพานถูกน้ำพัดหายไป
ผู้คนต้องนั่งเรือข้ามแม่น้ำและรออยู่ถึงสามปีกว่าจะได้สะพานใหม่
ตอนนี้ถนนกว้างขึ้นและขับรถไปไม่ถึงหนึ่งชั่วโมง แต่คุณปู่ก็ยังบอกว่าคิดถึงทางที่เคยเดินเมื่อก่อนนี้""",
}
WRONG = {"ja": "cp932", "ko": "cp949", "th": "cp874"}


@pytest.mark.parametrize("code", PROSE)
def test_prose_stays_and_each_bad_page_goes_for_its_reason(code: str) -> None:
    prose = PROSE[code]
    first = prose.split("\n")[0]
    pages = {
        "prose": prose,
        "share of duplicate lines": f"{first}\n" * 20,
        "share of characters from wrong decoding": prose.encode().decode(WRONG[code], "replace"),
        "share of letters": (
            "The people walked along the river and talked about the weather of the week. "
        )
        * 20,
    }
    data = CrawlConfig.model_validate(
        {"language": {"languages": [code]}, "rules": [{"kind": kind} for kind in KINDS]}
    )
    chains = LanguageRuleChains(parse_language_rules(serialize_rules_by_language(data)))
    left = list(pages)
    gone: dict[str, str] = {}
    outcomes = chains.apply(
        pa.array(pages.values(), pa.large_string()), pa.array([code] * len(pages))
    )
    for outcome in outcomes:
        gone |= {
            name: test for name, test in zip(left, outcome.test.to_pylist(), strict=True) if test
        }
        left = [name for name, keep in zip(left, outcome.keep.to_pylist(), strict=True) if keep]
    assert left == ["prose"]
    assert all(test.startswith(name) for name, test in gone.items())
