"""What LongBench's data sets ask, in words of our own and in each one's language. ``{context}`` and ``{input}`` are a
record's fields."""

# ruff: noqa: E501, RUF001

STORY = "Read this story and answer the question after it in as few words as possible.\n\n{context}\n\nQuestion: {input}\nAnswer in as few words as possible, without explanation:"
PAPER = "Read this paper and answer the question after it, with a phrase or one sentence. Say yes or no where that is the answer, and unanswerable where the paper does not tell.\n\n{context}\n\nQuestion: {input}\nAnswer (brief, without explanation):"
TEXT = "Read this text and answer the question after it briefly.\n\n{context}\n\nQuestion: {input}\nThe answer and nothing else:"
PASSAGES = "Answer the question after these passages from them.\n\n{context}\n\nQuestion: {input}\nThe answer and nothing else:"
TEXT_ZH = "读下面的文字，再简短地回答后面的问题。\n\n{context}\n\n问题：{input}\n只写答案："
PASSAGES_ZH = "根据下面的文章回答后面的问题。\n\n{context}\n\n问题：{input}\n答案："
REPORT = "Summarise this government report on about one page.\n\n{context}\n\nSummary, about one page:"
MEETING = "Answer the request after this transcript of a meeting in a few sentences.\n\n{context}\n\nRequest: {input}\nAnswer:"
NEWS = "Summarise all of these news articles together on about one page.\n\n{context}\n\nSummary, about one page:"
MEETING_ZH = "读下面的会议记录，并总结其内容。\n\n{context}\n\n总结："
TYPES = "Name the type of the last question, as these examples do.\n\n{context}\n{input}"
TRIVIA = (
    "Answer the last question from its passage, as these examples do, and with nothing else.\n\n{context}\n\n{input}"
)
DIALOGUES = "Sum up the last dialogue in a few short sentences, as these examples do.\n\n{context}\n\n{input}"
NEWS_TYPES_ZH = "按照下面的例子，写出最后一条新闻的类别。\n\n{context}\n{input}"
COUNT = "Some of these paragraphs occur more than once. How many different ones are there?\n\n{context}\n\nWrite only the number of different paragraphs:"
WHICH = 'Which of these paragraphs is the summary after them of?\n\n{context}\n\nSummary:\n{input}\n\nAnswer in the form "Paragraph 7":'
WHICH_ZH = "后面的摘要出自下面哪一个段落？\n\n{context}\n\n摘要：\n{input}\n\n请用“段落7”这样的形式回答："
CODE = "Write the next line of this code.\n{context}{input}Next line:\n"
