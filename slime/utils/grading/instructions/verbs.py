"""Whether a word can be a verb, without a model of the language: by a list and by endings."""

_BASE_TEXT = """
accept achieve act adapt add address adjust adopt advise aim align allow analyze answer apply approach
argue arrange ask aspire assemble assess assign assume attach attempt avoid balance be become begin
believe boil boost borrow break bring build buy calculate call capture carry catch celebrate change
charge check choose clarify clean close collect combine come communicate compare complete compute
conduct confirm connect consider construct consult contact continue contribute control convert cook copy
correct cover craft create cultivate cut dance debug decide declare decrease deem define deliver
demonstrate deploy derive describe design determine develop discover discuss divide do document download
draft draw dream drink drive drop educate eliminate embark embrace emphasize employ empower enable
encourage engage enhance enjoy ensure enter envision establish estimate evaluate examine execute
exercise expand expect experience experiment explain explore express extend extract face feel fight fill
finalize find finish fix focus follow forget form foster gain gather generate get give go grab grasp
greet grow guess guide handle harness have hear heat help highlight hold identify ignore illustrate
imagine implement improve include incorporate increase inform initialize inspect inspire install
integrate introduce invest investigate invite involve join journey judge jump keep know launch lead
learn leave let leverage lie list listen live locate look love maintain make manage map mark master
maximize measure meet melt memorize mention minimize mix monitor move multiply name navigate need
negotiate note notice observe obtain offer open optimize order organize outline overcome own paint
participate pay perform pick picture place plan play ponder pour practice prepare present press prevent
prioritize proceed produce promote propose protect prove provide pull purchase push put question raise
reach read realize recall receive recognize recommend record reduce refer reflect reimagine relate relax
remain remember remove repeat replace report represent research respect respond rest retrieve return
reveal review rewrite ride rise run save say scale search see seek seem select send separate serve set
share shift show simplify simulate sing sit sketch solve sort speak specify spend spread stand start
state stay step stir stop store strengthen strive structure study submit substitute suggest summarize
support suppose surround take talk teach tell test thank think throw track trade train transform
translate transport travel treat trust try turn understand unleash unlock unveil update upload use
utilize validate venture verify view visit visualize vote wait wake walk want wash watch wear weave
weigh welcome win witness work worry write am is are was were been being has had did does can could may
might must shall should will would
"""
_BASE = frozenset(_BASE_TEXT.split())
_ENDINGS = ("ing", "ize", "ise", "ify", "ated", "ized", "ised", "ified")


def may_be_verb(word: str) -> bool:
    """True of forms of the common verbs, and of words that end like verbs."""
    word = word.lower()
    stems = {
        word,
        word.removesuffix("s"),
        word.removesuffix("es"),
        word.removesuffix("d"),
        word.removesuffix("ed"),
    }
    return bool(stems & _BASE) or (len(word) > 4 and word.endswith(_ENDINGS))
