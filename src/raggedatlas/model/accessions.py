"""Accessions, which name a species or a fixed list by themselves, and gene tables in one schema."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

UNKNOWN = "unknown"
"""Organism of a feature whose file does not say."""

# Species part of an Ensembl stable id (between "ENS" and the letter of the feature type) | common name | scientific name.
# The common name is the organism's name in an atlas. Human has no species part.
_ENSEMBL = """
|human|Homo sapiens
ACA|green anole|Anolis carolinensis
AME|giant panda|Ailuropoda melanoleuca
AMX|cavefish|Astyanax mexicanus
AOC|clown anemonefish|Amphiprion ocellaris
ANA|night monkey|Aotus nancymaae
APL|duck|Anas platyrhynchos
ATE|climbing perch|Anabas testudineus
BBB|bison|Bison bison bison
BIX|hybrid cattle|Bos indicus x Bos taurus
BTA|cow|Bos taurus
CAF|dog|Canis lupus familiaris
CAN|Angola colobus|Colobus angolensis palliatus
CAP|Brazilian guinea pig|Cavia aperea
CAT|sooty mangabey|Cercocebus atys
CCA|white-faced capuchin|Cebus imitator
CCN|Siamese crocodile|Crocodylus porosus
CCR|common carp|Cyprinus carpio
CGR|Chinese hamster|Cricetulus griseus
CHI|goat|Capra hircus
CHO|sloth|Choloepus hoffmanni
CIN|vase tunicate|Ciona intestinalis
CJA|white-tufted-ear marmoset|Callithrix jacchus
CLA|chinchilla|Chinchilla lanigera
CPB|painted turtle|Chrysemys picta bellii
CPO|guinea pig|Cavia porcellus
CPV|sheepshead minnow|Cyprinodon variegatus
CSA|vervet|Chlorocebus sabaeus
CSAV|Pacific transparent sea squirt|Ciona savignyi
DAR|zebrafish|Danio rerio
DLA|European seabass|Dicentrarchus labrax
DLE|beluga whale|Delphinapterus leucas
DNO|armadillo|Dasypus novemcinctus
DOR|kangaroo rat|Dipodomys ordii
EAS|donkey|Equus asinus
EBU|hagfish|Eptatretus burgeri
ECA|horse|Equus caballus
ECR|reedfish|Erpetoichthys calabaricus
EEU|hedgehog|Erinaceus europaeus
ELU|northern pike|Esox lucius
ETE|lesser hedgehog tenrec|Echinops telfairi
FAL|collared flycatcher|Ficedula albicollis
FCA|cat|Felis catus
FDA|Damara mole rat|Fukomys damarensis
FHE|mummichog|Fundulus heteroclitus
GAC|stickleback|Gasterosteus aculeatus
GAG|desert tortoise|Gopherus agassizii
GAF|western mosquitofish|Gambusia affinis
GAL|chicken|Gallus gallus
GGO|gorilla|Gorilla gorilla gorilla
GMO|cod|Gadus morhua
HBU|Burton's mouthbrooder|Haplochromis burtoni
HCO|tiger tail seahorse|Hippocampus comes
HGL|naked mole-rat|Heterocephalus glaber
IPU|channel catfish|Ictalurus punctatus
JJA|lesser Egyptian jerboa|Jaculus jaculus
KMA|mangrove rivulus|Kryptolebias marmoratus
LAC|coelacanth|Latimeria chalumnae
LAF|elephant|Loxodonta africana
LBE|ballan wrasse|Labrus bergylta
LLT|blue-ringed sea krait|Laticauda laticaudata
LOC|spotted gar|Lepisosteus oculatus
MAM|zig-zag eel|Mastacembelus armatus
MAU|golden hamster|Mesocricetus auratus
MEU|wallaby|Notamacropus eugenii
MFA|crab-eating macaque|Macaca fascicularis
MGA|turkey|Meleagris gallopavo
MIC|mouse lemur|Microcebus murinus
MLE|drill|Mandrillus leucophaeus
MLU|microbat|Myotis lucifugus
MMU|macaque|Macaca mulatta
MNE|pig-tailed macaque|Macaca nemestrina
MOC|prairie vole|Microtus ochrogaster
MOD|opossum|Monodelphis domestica
MPU|ferret|Mustela putorius furo
MUG|Mongolian gerbil|Meriones unguiculatus
MUS|mouse|Mus musculus
MZE|zebra mbuna|Maylandia zebra
NGA|Upper Galilee mountains blind mole rat|Nannospalax galili
NLE|gibbon|Nomascus leucogenys
NME|helmeted guineafowl|Numida meleagris
NVI|American mink|Neovison vison
OAB|blue tilapia|Oreochromis aureus
OAN|platypus|Ornithorhynchus anatinus
OAR|sheep|Ovis aries
OCU|rabbit|Oryctolagus cuniculus
ODE|degu|Octodon degus
OGA|bushbaby|Otolemur garnettii
ONI|Nile tilapia|Oreochromis niloticus
OPR|pika|Ochotona princeps
ORL|medaka|Oryzias latipes
PAN|olive baboon|Papio anubis
PCA|hyrax|Procavia capensis
PCI|koala|Phascolarctos cinereus
PCO|Coquerel's sifaka|Propithecus coquereli
PEM|northern American deer mouse|Peromyscus maniculatus bairdii
PFO|Amazon molly|Poecilia formosa
PKI|electric fish|Paramormyrops kingsleyae
PMA|lamprey|Petromyzon marinus
PMG|Periophthalmus magnuspinnatus|Periophthalmus magnuspinnatus
PMJ|great tit|Parus major
PPA|bonobo|Pan paniscus
PPR|leopard|Panthera pardus
PPY|Sumatran orangutan|Pongo abelii
PRE|guppy|Poecilia reticulata
PSI|Chinese softshell turtle|Pelodiscus sinensis
PST|Indian peafowl|Pavo cristatus
PTI|tiger|Panthera tigris altaica
PTR|chimpanzee|Pan troglodytes
PVA|megabat|Pteropus vampyrus
RNO|rat|Rattus norvegicus
RRO|golden snub-nosed monkey|Rhinopithecus roxellana
SAR|shrew|Sorex araneus
SAS|SARS-CoV-2|Severe acute respiratory syndrome coronavirus 2
SBO|Bolivian squirrel monkey|Saimiri boliviensis boliviensis
SCU|canary|Serinus canaria
SHA|Tasmanian devil|Sarcophilus harrisii
SHB|kakapo|Strigops habroptila
SMA|turbot|Scophthalmus maximus
SSA|Atlantic salmon|Salmo salar
SSC|pig|Sus scrofa
STO|squirrel|Ictidomys tridecemlineatus
TBE|tree shrew|Tupaia belangeri
TGE|gelada|Theropithecus gelada
TGU|zebra finch|Taeniopygia guttata
TMT|three-toed box turtle|Terrapene carolina triunguis
TNI|tetraodon|Tetraodon nigroviridis
TRU|fugu|Takifugu rubripes
TSY|tarsier|Carlito syrichta
TTR|dolphin|Tursiops truncatus
UAM|American black bear|Ursus americanus
UMA|polar bear|Ursus maritimus
VPA|alpaca|Vicugna pacos
VUR|common wombat|Vombatus ursinus
VVU|red fox|Vulpes vulpes
XET|tropical clawed frog|Xenopus tropicalis
XMA|platyfish|Xiphophorus maculatus
ZAL|white-throated sparrow|Zonotrichia albicollis
"""

_OTHER_ORGANISMS = """
|fruit fly|Drosophila melanogaster
|roundworm|Caenorhabditis elegans
|yeast|Saccharomyces cerevisiae
|African clawed frog|Xenopus laevis
|synthetic construct|synthetic construct
"""

_TAXA = {
    "9606": "human", "10090": "mouse", "10116": "rat", "7955": "zebrafish", "9823": "pig", "9544": "macaque",
    "9541": "crab-eating macaque", "9483": "white-tufted-ear marmoset", "9593": "gorilla", "9595": "gorilla", "9598": "chimpanzee",
    "30608": "mouse lemur", "9986": "rabbit", "7227": "fruit fly", "6239": "roundworm", "2697049": "SARS-CoV-2",
    "32630": "synthetic construct", "9031": "chicken", "9913": "cow", "9615": "dog", "4932": "yeast", "8364": "tropical clawed frog",
}  # fmt: skip

_ASSEMBLIES = {
    "GRCh37": "human", "GRCh38": "human", "hg19": "human", "hg38": "human", "T2T-CHM13": "human",
    "GRCm38": "mouse", "GRCm39": "mouse", "mm9": "mouse", "mm10": "mouse", "mm39": "mouse",
    "Rnor_6.0": "rat", "mRatBN7.2": "rat", "rn6": "rat", "rn7": "rat", "GRCz10": "zebrafish", "GRCz11": "zebrafish",
    "Sscrofa11.1": "pig", "susScr11": "pig", "Mmul_10": "macaque", "rheMac10": "macaque", "BDGP6": "fruit fly", "dm6": "fruit fly",
    "WBcel235": "roundworm", "ce11": "roundworm",
}  # fmt: skip

# Databases whose accessions name the organism, or no organism, by their own form.
_DATABASES = (
    ("flybase", re.compile(r"FBgn\d{7}"), "fruit fly"),
    ("wormbase", re.compile(r"WBGene\d{8}"), "roundworm"),
    ("sgd", re.compile(r"(SGD:)?S\d{9}|Y[A-P][LR]\d{3}[WC](-[A-H])?"), "yeast"),
    ("hgnc", re.compile(r"HGNC:\d+"), "human"),
    ("mgi", re.compile(r"MGI:\d+"), "mouse"),
    ("mgp", re.compile(r"MGP_\w+_G\d{7}"), "mouse"),
    ("rgd", re.compile(r"RGD:\d+"), "rat"),
    ("zfin", re.compile(r"(ZFIN:)?ZDB-[A-Z]*GENE-\d{6}-\d+"), "zebrafish"),
    ("lrg", re.compile(r"LRG_\d+"), "human"),
    ("ercc", re.compile(r"ERCC-\d{5}"), "synthetic construct"),
    ("refseq", re.compile(r"[NX][MRPG]_\d{6,9}(?P<version>\.\d+)?"), UNKNOWN),
)

_ANY_DATABASE = re.compile("|".join(f"(?:{re.sub('[?]P<version>', '?:', form.pattern)})" for _, form, _ in _DATABASES))
_ENS = re.compile(r"ENS(?P<letters>[A-Z]+)(?P<digits>\d{6,})(?P<version>\.\d+)?(?P<rest>_PAR_Y)?")
_TYPES = ("G", "T", "P", "E", "R", "GT", "FM")
_PREFIX = re.compile(rf"(?P<assembly>{'|'.join(map(re.escape, _ASSEMBLIES))})_+(?P<name>.+)")

_NEEDS_PARSING = "^(?:" + "|".join(["ENS", *map(re.escape, _ASSEMBLIES), _ANY_DATABASE.pattern]) + ")"
"""Matches the start of every text that is an accession, or has an assembly before it, and of some others."""


@dataclass(frozen=True)
class Accession:
    """What the text of an identifier says by itself."""

    namespace: str  # issuer, e.g. "ensembl"; "symbol" for a name that is not an accession
    name: str  # the accession without its version, or the name
    organism: str  # common name; "unknown" where the text does not say
    version: str = ""  # suffix without the dot, or empty


def parse_accession(text: str) -> Accession:
    """Return what an identifier says by itself: its namespace, organism and version.

    A genome assembly before the identifier, as Cell Ranger writes it for references of several species, names the
    organism and is split off. The namespace is ``"symbol"`` where the text is no accession of a known form.

    Examples
    --------
    >>> parse_accession("ENSMUSG00000003379.8")
    Accession(namespace='ensembl', name='ENSMUSG00000003379', organism='mouse', version='8')
    >>> parse_accession("CD79A")
    Accession(namespace='symbol', name='CD79A', organism='unknown', version='')
    >>> parse_accession("GRCh38_CD79A").organism, parse_accession("mm10___ENSMUSG00000003379").name
    ('human', 'ENSMUSG00000003379')
    """
    match = _PREFIX.fullmatch(text) if "_" in text else None
    if match is not None:
        # The rest may be an accession, whose own organism then counts; the assembly decides where it has none.
        inner = parse_accession(match["name"])
        organism = _ASSEMBLIES[match["assembly"]] if inner.organism == UNKNOWN else inner.organism
        return Accession(inner.namespace, inner.name, organism, inner.version)
    if text.startswith("ENS"):
        match = _ENS.fullmatch(text)
        if match is not None:
            letters, digits, version, rest = match.groups()
            # `_PAR_Y` stays in the name: it is the copy on Y of a gene that X has under the bare accession.
            return Accession("ensembl", f"ENS{letters}{digits}{rest or ''}", _species(letters), (version or ".")[1:])
    # One look first: most names of a file are symbols, and a file has tens of thousands.
    for namespace, form, organism in _DATABASES if _ANY_DATABASE.fullmatch(text) else ():
        match = form.fullmatch(text)
        if match is not None:
            version = match.groupdict().get("version") or ""
            return Accession(namespace, text.removesuffix(version), organism, version[1:])
    return Accession("symbol", text, UNKNOWN)


@cache
def _species(letters: str) -> str:
    """Return the organism of an Ensembl prefix without ``ENS``: the species part before the letters of the feature type."""
    table = _ensembl()
    # A species part can end in these letters too, so the table of species decides where to cut.
    for kind in _TYPES:
        if letters.endswith(kind) and letters.removesuffix(kind) in table:
            return table[letters.removesuffix(kind)]
    return UNKNOWN


def organism_name(text: str) -> str:
    """Return the name of an organism as an atlas writes it: the common name where it is known.

    `text` is a common or scientific name, an NCBI taxon (``"NCBITaxon:9606"``) or a genome assembly; case does not
    matter. Names that are in no table come back in lower case, an empty one as ``"unknown"``.

    Examples
    --------
    >>> (
    ...     organism_name("Homo sapiens"),
    ...     organism_name("NCBITaxon:10090"),
    ...     organism_name("GRCh38"),
    ...     organism_name("Axolotl"),
    ... )
    ('human', 'mouse', 'human', 'axolotl')
    """
    folded = _folded(text)
    return _organisms().get(folded.removeprefix("ncbitaxon:"), folded) or UNKNOWN


def is_organism(text: str) -> bool:
    """Return whether a table knows an organism, a taxon or an assembly of this name."""
    return _folded(text).removeprefix("ncbitaxon:") in _organisms()


def _folded(text: str) -> str:
    return " ".join(text.replace("_", " ").lower().split())


@cache
def _ensembl() -> dict[str, str]:
    rows = [line.split("|") for line in _ENSEMBL.strip("\n").splitlines()]
    return {species: common for species, common, _ in rows}


@cache
def _organisms() -> dict[str, str]:
    rows = [line.split("|") for line in (_ENSEMBL + _OTHER_ORGANISMS).split("\n") if line]
    names = {scientific.lower(): common for _, common, scientific in rows} | {c.lower(): c for _, c, _ in rows}
    return names | {k.lower().replace("_", " "): v for k, v in _ASSEMBLIES.items()} | _TAXA


def parse_symbols(texts: Sequence[str]) -> list[str]:
    """Return the name that `parse_accession` gives each text that is no accession, and an empty text for accessions.

    A file has tens of thousands of symbols, of which Arrow finds the few that need more than a look in some milliseconds.
    """
    column = pa.array(texts, pa.string())
    # RE2 knows ASCII digits and letters only, and Python those of all scripts.
    plain = pc.and_(pc.string_is_ascii(column), pc.invert(pc.match_substring_regex(column, _NEEDS_PARSING)))
    symbols = list(texts)
    for i in np.flatnonzero(~plain.to_numpy(zero_copy_only=False)).tolist():
        one = parse_accession(texts[i])
        symbols[i] = one.name if one.namespace == "symbol" else ""
    return symbols


def are_accessions(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return for each text whether it is an accession of a known form, without an assembly before it; False for null."""
    # RE2 refuses a group name that occurs twice (`version`), so the groups lose their names.
    forms = "|".join(
        re.sub(r"\(\?P<\w+>", "(?:", form.pattern) for form in (_ENS, *(form for _, form, _ in _DATABASES))
    )
    return pc.fill_null(pc.match_substring_regex(texts, f"^(?:{forms})$"), fill_value=False)


GENES_SCHEMA = pa.schema(
    [
        pa.field("table", pa.string(), nullable=False),
        pa.field("accession", pa.string(), nullable=False),
        pa.field("organism", pa.string(), nullable=False),
        pa.field("symbol", pa.string()),
        pa.field("previous", pa.list_(pa.string()), nullable=False),
        pa.field("aliases", pa.list_(pa.string()), nullable=False),
        pa.field("same", pa.list_(pa.string()), nullable=False),
        pa.field("biotype", pa.string()),
    ]
)
"""One row per gene of a loaded table: its accession without version, current symbol, previous symbols, aliases, and the accessions
that the table gives as the same gene."""

ORTHOLOGS_SCHEMA = pa.schema(
    [
        pa.field("table", pa.string(), nullable=False),
        pa.field("accession", pa.string(), nullable=False),
        pa.field("organism", pa.string(), nullable=False),
        pa.field("symbol", pa.string()),
        pa.field("other", pa.string(), nullable=False),
        pa.field("other_organism", pa.string(), nullable=False),
        pa.field("other_symbol", pa.string()),
        pa.field("relation", pa.string(), nullable=False),
    ]
)
"""One row per pair of genes of two organisms; `relation` is ``one2one``, ``one2many``, ``many2one`` or ``many2many``."""

GENES, ORTHOLOGS = "genes", "orthologs"
"""Kinds of tables."""

NOMENCLATURE = frozenset({"HGNC", "MGI"})
"""Authorities that name genes; others repeat their names in annotations."""


@dataclass(frozen=True)
class GeneTableInfo:
    """Which table it is, and where it comes from."""

    name: str  # in the atlas; a table of this name replaces the one before
    kind: str  # "genes", "orthologs" or "terms"
    source: str  # who says it, e.g. "HGNC", "GENCODE"
    release: str  # release or date; empty where neither the file nor the caller says
    organisms: tuple[str, ...]  # common names
    n_rows: int  # genes, pairs or terms
    sha256: str  # of the file's text, unpacked
    loaded_at: str = ""  # when the atlas got it, in ISO format; empty for a table that no atlas has

    @property
    def rank(self) -> int:
        """Rank of its symbols: 0 of the authority that names the genes, 1 of an annotation."""
        return 0 if self.source in NOMENCLATURE else 1

    def cite(self, what: str) -> str:
        """Format the evidence of a row, e.g. ``"HGNC previous symbol, release 2026-07"``."""
        return f"{self.source} {what}" + (f", release {self.release}" if self.release else "")


@dataclass(frozen=True)
class GeneTable:
    """A table as it was read from a file, before an atlas has it."""

    info: GeneTableInfo
    rows: pa.Table  # of `GENES_SCHEMA` or `ORTHOLOGS_SCHEMA`, by `info.kind`


def infos_to_json(infos: tuple[GeneTableInfo, ...]) -> str:
    """Write the list of tables as JSON, ordered by name."""
    return json.dumps([asdict(info) for info in sorted(infos, key=lambda info: info.name)])


def infos_from_json(text: str) -> tuple[GeneTableInfo, ...]:
    """Read the list of tables."""
    return tuple(GeneTableInfo(**{**entry, "organisms": tuple(entry["organisms"])}) for entry in json.loads(text))
