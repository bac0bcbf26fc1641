"""The sentences of the corpus: templates by topic, and common questions with their answers.

`{slot}` stands for a word of `WORDS[slot]`, never the same word twice in a line; `{slot!}` repeats the first of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topic:
    name: str
    weight: int
    """Share of the corpus, relative to the other topics."""
    templates: str
    """One a line; a template that stands twice is drawn twice as often."""


TOPICS = (
    Topic(
        "weather in the news",
        10,
        """
        {city}{day}有{weather} {caution}
        {city}发布{weather}{alert}预警 {caution}
        {region}{day}迎来{weather} 气温降至{degrees}度
        {region}{day}将出现{weather}天气
        {city}{day}{sky} 最高气温{degrees}度
        {city}{day}{sky} 气温{degrees}度左右 {invitation}
        {city}{day}{time_of_day}天气{fine} 市民出门踏青
        {province}多地出现{weather} 气象部门提醒{caution}
        {city}气温回升至{degrees}度 {season}的气息扑面而来
        {city}{month}平均气温{degrees}度
        {region}{weather}持续 多地启动应急响应
        {province}{day}{time_of_day}局部有{weather}
        {city}{day}天气{fine} 最高气温{degrees}度
        {city}迎来今年首场{weather}
        专家解读{region}为何频现{weather}
        """,
    ),
    Topic(
        "talk about the weather",
        14,
        """
        今天天气{fine}，{invitation}。
        今天天气{fine}，{invitation}。
        今天天气{fine}，我们去{place}吧。
        今天天气不错，我们去{place}{hobby}。
        今天天气不错，我和{relative}去{place}{hobby}。
        今天天气不错，{who}{time_of_day}去{sight}，{impression}。
        今天天气不错，{city}气温{degrees}度，{invitation}。
        今天天气{fine}，{who}打算去{exercise}。
        今天天气{fine}，{city}最高气温{degrees}度。
        今天天气{fine}，{relative}说{invitation}。
        {city}今天天气{fine}，{invitation}。
        今天天气{foul}，{caution}。
        明天天气{fine}，{invitation}。
        {day}天气{foul}，{caution}。
        {season}的天气{fine}，{invitation}。
        问：今天天气怎么样？答：今天天气{fine}，{invitation}。
        问：今天天气怎么样？答：今天{sky}，{invitation}。
        问：{city}{day}天气怎么样？答：{sky}，气温{degrees}度，{caution}。
        问：{city}{day}天气好吗？答：天气{fine}，{invitation}。
        问：{day}会下雨吗？答：{likelihood}会有{weather}，{caution}。
        问：{day}{time_of_day}冷不冷？答：大概{degrees}度，{caution}。
        问：{day}适合{exercise}吗？答：天气{fine}，可以去。
        问：{city}{season}冷吗？答：最低{degrees}度，{caution}。
        外面下{weather}了，{caution}。
        听说{city}{day}有{weather}，{caution}。
        """,
    ),
    Topic(
        "traffic",
        8,
        """
        {city}{line}因{traffic_cause}{traffic_state}
        {city}{road}{traffic_state} 请提前规划路线
        {city}{road}因{traffic_cause}{traffic_state}
        {city}地铁{line}{day}开通运营
        {city}{line}延长运营至晚上{hour}
        {festival}假期{city}{station}客流增长{percent}
        {city}新增{few}条公交线路 方便市民出行
        {city}到{city}高铁最快{few}小时到达
        {city}{station}{day}发送旅客{many}人次
        {city}{road}改造工程{month}完工
        问：去{place}怎么走？答：坐{line}到{road}下车，就在{direction}。
        问：{station}离这里远吗？答：不远，坐{vehicle}{few}站就到。
        问：从{city}到{city}怎么去？答：坐{vehicle}比较方便，大约{few}个小时。
        问：{road}现在堵车吗？答：{road!}{traffic_state}。
        请问{place}在哪里？就在{road}{direction}。
        我每天坐{vehicle}上班，大概要{many}分钟。
        {time_of_day}{hour}的{vehicle}还有票吗？
        """,
    ),
    Topic(
        "business",
        9,
        """
        {index}{movement}{percent} {sector}板块领涨
        {index}{day}{movement} 成交额{money}
        {sector}板块{movement} {company}涨停
        {company}{business_news}
        {company}{period}营收{money} 同比增长{percent}
        {company}获{money}融资 布局{sector}
        {goods}价格{price_movement} 市场供应充足
        {city}{goods}价格{period}{price_movement}{percent}
        {city}房价环比下降{percent} 成交量回升
        {city}发放{money}消费券 促进{sector}消费
        {province}{period}进出口总额增长{percent}
        {sector}行业{period}投资增长{percent}
        {company}与{company}签署{sector}合作协议
        央行开展逆回购操作 市场流动性合理充裕
        {city}支持小微企业 减税{money}
        分析师：{sector}板块{period}有望{movement}
        问：{goods}最近贵吗？答：{goods!}价格{price_movement}了{percent}。
        问：{index}今天怎么样？答：{index!}{movement}{percent}。
        问：这件{garment}多少钱？答：{price}，可以便宜一点。
        """,
    ),
    Topic(
        "sport",
        8,
        """
        {game}{event}：{team}{score}{result}{team}
        {team}{result}{team} 晋级{game}{event}
        {team}{result}{team} {surname}教练：队员发挥出色
        {city}马拉松{day}开跑 {many}名选手参赛
        {surname}{given_name}夺得{game}{event}冠军
        全国{game}{event}在{city}开幕
        {city}举办{game}{event} {many}人报名
        {team}客场{score}{result}{team}
        {team}新赛季首秀 {score}{result}{team}
        {team}签下新外援 备战{game}{event}
        {city}建成{few}个社区{game}场
        问：你喜欢什么运动？答：我喜欢{exercise}，每周{few}次。
        问：昨晚的{game}赛谁赢了？答：{team}{score}{result}{team}。
        问：{day}一起去{exercise}吗？答：{consent}，{time_of_day}{hour}见。
        {who}每天坚持{exercise}，身体越来越好。
        {exercise}的时候要注意安全，记得先热身。
        """,
    ),
    Topic(
        "technology",
        9,
        """
        {technology}{technology_news}
        {city}{technology}产业园{month}投入使用
        {technology}技术{technology_news} 专家：前景广阔
        {company}发布新款{device} 售价{device_price}起
        {company}{technology}项目{technology_news}
        我国{technology}{technology_news}
        {city}高校研发{technology}系统 {technology_news}
        {technology}让{sector}行业更高效
        {many}家企业亮相{city}{technology}大会
        {province}出台{technology}发展计划 投入{money}
        {device}里的{technology}你用过吗
        问：什么是{technology}？答：{technology!}是一种新技术，已经{technology_news}。
        问：我的{device}{fault}怎么办？答：{remedy}。
        问：{device}{fault}，能修吗？答：{remedy}，不行再送修。
        问：学{skill}难吗？答：不难，每天练习{few}十分钟就好。
        问：{company}的{device}好用吗？答：{likelihood}不错，{device_price}很划算。
        新买的{device}很好用，就是{fault}。
        {who}用{device}查资料，非常方便。
        """,
    ),
    Topic(
        "food",
        10,
        """
        {city}美食节开幕 {dish}最受欢迎
        {city}{dish}入选名小吃
        {season}吃什么好 {fruit}正当季
        {city}老字号推出新口味{dish}
        {dish}怎么做才好吃 大厨教你{few}招
        {fruit}价格{price_movement} {province}产区大量上市
        营养师：每天喝{drink}要适量
        {dish}{taste}，再来一碗{drink}。
        今天{time_of_day}吃{dish}，{taste}。
        {relative}做的{dish}{taste}。
        我早上吃了{breakfast}，喝了{drink}。
        我喜欢吃{fruit}，也喜欢喝{drink}。
        {city}的{dish}{taste}，你一定要尝尝。
        问：你想吃什么？答：我想吃{dish}。
        问：{dish}好吃吗？答：{taste}，推荐你试试。
        问：你喝什么？答：来一杯{drink}，{thanks}。
        问：早饭吃什么？答：{breakfast}和{drink}。
        问：{dish}怎么做？答：先把材料洗干净，再用小火慢慢做。
        问：{fruit}多少钱一斤？答：{price}，很{flavour}。
        问：这家店的{dish}怎么样？答：{taste}，一份{price}。
        服务员，来一份{dish}，再来一杯{drink}。
        """,
    ),
    Topic(
        "travel",
        8,
        """
        {sight}{festival}接待游客{many}人次
        {sight}{season_formal}风景如画 吸引众多游客
        {sight}门票下调{percent}
        {city}推出{few}条{season_formal}旅游线路
        {festival}出游热 {city}酒店预订增长{percent}
        {city}到{sight}旅游专列{day}开行
        {sight}{month}起实行预约参观
        去{city}旅游，一定要去{sight}，{impression}。
        {who}{day}去了{sight}，{impression}。
        {season}的{sight}{impression}。
        出门旅游记得带{luggage}和{luggage}。
        问：{sight}好玩吗？答：{impression}，建议{time_of_day}去。
        问：去{sight}要多少钱？答：来回车票{price}，门票{price}。
        问：你去过{city}吗？答：去过，{impression}。
        问：{festival}去哪里玩？答：去{city}看{sight}吧，{impression}。
        问：旅游要带什么？答：带上{luggage}、{luggage}和{luggage}。
        我打算{month}去{city}玩{few}天。
        从{city}坐{vehicle}去{sight}，大约{few}个小时。
        """,
    ),
    Topic(
        "school",
        6,
        """
        {city}一{school}{school_news}
        {province}{many}所{school}{school_news}
        {city}{school}{day}{school_news}
        {subject}老师用{device}上课 学生直呼有趣
        {province}高考{subject}试题平稳 难度适中
        {city}新建{few}所{school} 新增学位{many}个
        专家：学好{subject}要从兴趣开始
        {given_name}的{subject}考了一百分，{relative}很{mood}。
        问：{subject}作业写完了吗？答：写完了，正在复习{subject}。
        问：你最喜欢哪门课？答：我最喜欢{subject}课。
        问：明天有什么课？答：有{subject}课和{subject}课。
        问：怎样学好{subject}？答：上课认真听，课后多练习。
        {surname}老师教我们{subject}，讲得很清楚。
        同学们在{place}学习{subject}，大家都很认真。
        今天学习{subject}{lesson}，请大家打开书。
        """,
    ),
    Topic(
        "health",
        6,
        """
        {season_formal}易发{ailment} 医生提醒{advice}
        {city}医院开设{ailment}门诊
        专家：{ailment}不可忽视 要{advice}
        {city}为{many}名老人免费体检
        {exercise}有助于缓解{ailment}
        问：我{ailment}了怎么办？答：{advice}，{advice}。
        问：{ailment}要注意什么？答：要{advice}，也要{advice}。
        问：你怎么了？答：我有点{ailment}，想休息一下。
        问：{ailment}能{exercise}吗？答：最好先{advice}。
        {season}到了，注意{advice}，小心{ailment}。
        {surname}医生说要{advice}，不要太{mood}。
        {relative}{ailment}了，我陪{relative!}去医院。
        """,
    ),
    Topic(
        "culture",
        6,
        """
        {city}{cultural_event}{day}开幕
        {city}{cultural_event}吸引{many}名观众
        电影{film}票房突破{money}
        电影{film}{day}上映 {surname}{given_name}主演
        {film}获{city}电影节最佳影片
        {city}博物馆推出{cultural_event} 免费开放{few}天
        {festival}到 {city}举办{cultural_event}
        {city}{place}{festival}举办{cultural_event}
        {surname}{given_name}新书发布 讲述{city}故事
        问：{film}好看吗？答：很好看，我看了{few}遍。
        问：{day}去看{cultural_event}吗？答：{consent}，{time_of_day}{hour}在门口见。
        问：{festival}做什么？答：{festival_custom}。
        问：你喜欢听什么歌？答：我喜欢听{season}的歌。
        {festival}快到了，{who}准备{festival_custom}。
        {festival}我们一起{festival_custom}，大家都很{mood}。
        """,
    ),
    Topic(
        "society",
        7,
        """
        {city}{local_news}
        {city}一小区：{local_news}
        {province}{crop}{crop_news}
        {province}{crop}{crop_news} 亩产增长{percent}
        {city}{environment_news}
        {province}{environment_news}
        暖心！{city}{local_news}
        {city}{many}名志愿者走进{place}
        {city}招聘会{day}举行 提供岗位{many}个
        {city}{job}短缺 企业加薪{percent}
        {city}{place}{month}起免费开放
        {city}一{job}{few}年如一日坚守岗位
        {city}迎来{festival}{many}名市民走进{place}
        """,
    ),
    Topic(
        "small talk",
        14,
        """
        {greeting}，很高兴认识你。
        {greeting}，请问{place}在哪里？
        {greeting}，我叫{given_name}，我是{job}。
        {greeting}，{surname}{title}，最近忙吗？
        {greeting}，{surname}{title}，好久不见。
        {thanks}，{farewell}。
        问：你好吗？答：我很好，{thanks}，你呢？
        问：你叫什么名字？答：我叫{surname}{given_name}，你可以叫我{given_name}。
        问：你是哪里人？答：我是{city}人。
        问：你是做什么工作的？答：我是{job}，在{city}工作。
        问：你有什么爱好？答：我喜欢{hobby}和{hobby}。
        问：你{day}有空吗？答：有空，{time_of_day}一起{hobby}吧。
        问：你{day}做什么？答：我打算去{place}{hobby}。
        问：现在几点了？答：现在{time_of_day}{hour}。
        问：你今年多大了？答：我今年{number}岁。
        问：你家有几口人？答：{few}口人，有{relative}和{relative}。
        问：你为什么{mood}？答：因为{day}要去{place}。
        问：能帮我一个忙吗？答：{consent}，什么事？
        问：你什么时候回来？答：{day}{time_of_day}{hour}回来。
        问：{relative}在家吗？答：{relative!}去{place}了，{hour}回来。
        问：你喜欢什么颜色？答：我喜欢{colour}。
        问：你喜欢什么动物？答：我喜欢{animal}，{animal!}{animal_habit}。
        问：{place}几点开门？答：早上{hour}开门。
        问：我们{day}去哪里？答：去{place}吧，就在{direction}。
        问：你觉得这件{colour}的{garment}怎么样？答：很好看，{price}也不贵。
        {who}{day}去{place}{hobby}。
        我今天很{mood}，因为{relative}来看我了。
        {relative}喜欢{hobby}，我喜欢{hobby}。
        {relative}是{job}，在{city}工作。
        {animal}{animal_habit}，小朋友都喜欢。
        我家的{animal}{animal_habit}。
        {day}是{festival}，我们{festival_custom}。
        {surname}{title}，{thanks}，您辛苦了。
        {day}{time_of_day}{hour}开会，请准时参加。
        祝你{festival}快乐，天天{mood}。
        别担心，{day}一定会好的。
        时间不早了，早点休息，{farewell}。
        """,
    ),
)

QUESTION_OPENINGS = ("问：", "问：请问", "问：老师，", "问：你知道", "问：小朋友，", "问：我想问问，")
ANSWER_OPENINGS = ("答：", "答：我知道，", "答：是这样，", "答：很简单，")

FACTS = """
    太阳从哪边升起？|太阳从东边升起。
    一年有几个月？|一年有十二个月。
    一星期有几天？|一星期有七天。
    一天有多少小时？|一天有二十四小时。
    一小时有多少分钟？|一小时有六十分钟。
    一年有几个季节？|有春夏秋冬四个季节。
    水在多少度结冰？|水在零度结冰。
    水烧到多少度会开？|水到一百度会开。
    天空是什么颜色？|晴天的天空是蓝色的。
    草是什么颜色的？|草是绿色的。
    雪是什么颜色的？|雪是白色的。
    中国最长的河是哪条？|中国最长的河是长江。
    世界上最高的山是什么？|世界上最高的山是珠穆朗玛峰。
    月亮会自己发光吗？|不会，月亮反射太阳的光。
    熊猫吃什么？|熊猫最爱吃竹子。
    蜜蜂会做什么？|蜜蜂会采花蜜。
    中秋节吃什么？|中秋节吃月饼。
    端午节吃什么？|端午节吃粽子。
    元宵节吃什么？|元宵节吃汤圆。
    春节吃什么？|北方人春节爱吃饺子。
    地球是什么形状？|地球是圆的。
    人有几只手？|人有两只手。
    牛奶从哪里来？|牛奶来自奶牛。
    鱼生活在哪里？|鱼生活在水里。
    鸟用什么飞？|鸟用翅膀飞。
    《静夜思》是谁写的？|《静夜思》是李白写的。
    《春晓》是谁写的？|《春晓》是孟浩然写的。
    床前明月光的下一句是什么？|疑是地上霜。
    白日依山尽的下一句是什么？|黄河入海流。
    春眠不觉晓的下一句是什么？|处处闻啼鸟。
    红灯停，绿灯呢？|绿灯行。
"""
"""A question and its answer a line, with a bar between them."""
