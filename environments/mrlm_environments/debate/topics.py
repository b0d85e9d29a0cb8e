"""Topics of debates, written for this package, and rows of topics from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from mrlm_pl.errors import DataError

MAX_TOPIC_CHARACTERS = 2000

_TOPICS = """\
Schools: require uniforms | teach chess in every year | give homework to young children | replace grades with comments
Schools: ban mobile phones in class | start the day after nine | teach handwriting to every pupil | pay pupils for marks
Schools: make music lessons compulsory | group pupils by ability | serve meals without meat | teach personal finance
Universities: be free for every student | abolish entrance examinations | drop lectures for small seminars
Universities: accept donations from industry | publish all research without charge | admit students by lottery
Cities: ban private cars from their centres | make public transport free | allow taller buildings in old districts
Cities: host large sports events | pay residents to compost | close streets to traffic on Sundays | limit rentals
Cities: build cycle lanes on every main road | plant fruit trees along streets | charge drivers for congestion
Governments: pay every adult a basic income | tax sugary drinks | fund space exploration | abolish coins and banknotes
Governments: make voting compulsory | lower the voting age to sixteen | subsidise electric cars | build nuclear plants
Governments: ban advertising to children | tax inherited wealth heavily | fund public broadcasting | publish tax returns
Governments: replace prisons with supervised work | legalise all gambling | limit the length of the working week
Governments: stop subsidies for fishing fleets | protect wolves in farming regions | keep daylight saving time
Governments: ban single-use plastics | pay farmers to restore wetlands | set a maximum wage | subsidise local newspapers
Companies: let everyone work from home | publish the salaries of all employees | adopt a week of four working days
Companies: elect their managers | replace interviews with work samples | offer unlimited holidays | ban late email
Companies: share profits with every employee | disclose their use of water | hire without looking at degrees
Museums: return objects to their countries of origin | charge for entry | let visitors touch exhibits | sell spare works
Libraries: lend tools as well as books | open all night | charge fines for late returns | remove unread books
Hospitals: publish the results of every surgeon | let patients choose their doctor | allow visitors at any hour
Doctors: prescribe exercise before medicine | write notes that patients can read | be paid by results
Scientists: release data before publication | study the cloning of extinct animals | sign their reviews of papers
Newspapers: print corrections on the front page | hide comments from readers | refuse money from advertisers
Social networks: verify the identity of every user | hide the number of likes | let users pay in place of advertising
Social networks: delete posts after a year | show posts in order of time | admit nobody below sixteen
Sports leagues: limit the pay of players | use video referees | hold mixed competitions | ban betting sponsors
Parents: limit the screen time of children | choose the school of their children | pay children for household chores
Zoos: keep large predators | breed endangered species only | become sanctuaries without visitors
Farmers: grow genetically modified crops | give up pesticides | raise insects for food | rent land to solar parks
Courts: broadcast their trials | use algorithms in sentencing | replace juries with panels of judges
Airlines: charge passengers by weight | offset all their emissions | stop flights of less than an hour
Restaurants: abolish tipping | print calories on the menu | serve tap water without charge | ban music at dinner
Programmers: review every change in pairs | write tests before code | rewrite old systems from scratch
Museums and theatres: offer free entry to the young | stream every performance | depend on donations alone
Shops: close on Sundays | accept payment in cash | remove sweets from the checkout | sell food past its date
Tourists: avoid endangered coral reefs | pay a tax for each night | learn the language of their hosts
Robots: care for old people | grade essays | drive delivery vans | fight fires in place of people
"""


def _read_topics() -> tuple[tuple[str, str], ...]:
    found = []
    for line in _TOPICS.splitlines():
        who, _, proposals = line.partition(": ")
        found += [(who, proposal.strip()) for proposal in proposals.split("|")]
    return tuple(found)


PROPOSALS = _read_topics()
"""Who should do what: the embedded topics."""


def generate_topic(rng: Random) -> dict[str, Any]:
    """A topic's data: the wording (``X should ...`` or ``X should not ...``, each as likely) and the proposal itself.

    The two wordings change the positions: who is for the one is against the other.
    """
    who, what = rng.choice(PROPOSALS)
    negated = rng.random() < 0.5
    return {"topic": f"{who} should {'not ' if negated else ''}{what}.", "proposal": f"{who}: {what}"}


def row_topic(row: Mapping[str, Any], number: int, source: object) -> dict[str, Any]:
    """Return a topic's data from a row of a data set.

    Raises:
        DataError: the topic is empty, no text, or too long.
    """
    topic = row["topic"]
    if not isinstance(topic, str) or not topic.strip() or len(topic) > MAX_TOPIC_CHARACTERS:
        raise DataError(
            f"{source}, row {number}: topic is {str(topic)[:80]!r}; it must be a text of 1 to {MAX_TOPIC_CHARACTERS} "
            "characters"
        )
    return {"topic": topic.strip()}
