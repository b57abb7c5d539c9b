#' Open an atlas
#'
#' Starts `raggedatlas serve --arrow`, which serves a snapshot to this R session on loopback until it is closed.
#'
#' @param address A published atlas (`"https://lab.org/lung.atlas@v3"`, `"hf://datasets/lab/lung"`, `"doi:10.5281/zenodo.123"`, a folder) or an
#'   atlas itself. `@` and the label or number of a snapshot may follow an address of a published one.
#' @param snapshot Label or number of a snapshot; `NULL` takes that of the address, or the newest.
#' @param command The command of the Python package, with its path where it is not on the search path.
#' @param storage_options Named character vector: credentials and endpoint of an object store.
#' @return An object of class `raggedatlas`.
#' @examples
#' \dontrun{
#' atlas <- open_atlas("https://lab.org/lung.atlas@v3")
#' atlas_datasets(atlas)
#' close(atlas)
#' }
open_atlas <- function(address, snapshot = NULL, command = Sys.getenv("RAGGEDATLAS", "raggedatlas"), storage_options = character()) {
  if (!nzchar(Sys.which(command))) {
    stop("There is no command ", command, "; install it with: pip install raggedatlas, or name it by the argument command.", call. = FALSE)
  }
  options <- if (length(storage_options)) paste0(names(storage_options), "=", storage_options) else character()
  arguments <- c(
    "serve", shQuote(path.expand(address)), "--arrow", if (!is.null(snapshot)) c("--at", shQuote(snapshot)),
    as.vector(rbind(rep("--storage-option", length(options)), shQuote(options))[seq_len(2 * length(options))])
  )
  errors <- tempfile("raggedatlas-")
  served <- without_libraries_of_r(pipe(paste(shQuote(command), paste(arguments, collapse = " "), "2>", shQuote(errors)), "r"))
  url <- readLines(served, 1)
  if (!length(url)) {
    close(served)
    stop(paste(c("The atlas was not opened.", readLines(errors, warn = FALSE)), collapse = "\n"), call. = FALSE)
  }
  unlink(errors)
  self <- structure(new.env(parent = emptyenv()), class = "raggedatlas")
  self$url <- url
  self$served <- served
  reg.finalizer(self, function(x) close.raggedatlas(x), onexit = TRUE)
  self$info <- ask(self, "info")
  self
}

#' @rdname open_atlas
#' @param con An atlas.
#' @param ... Not used.
close.raggedatlas <- function(con, ...) {
  if (!is.null(con$served)) {
    try(ask(con, "close"), silent = TRUE)
    try(close(con$served), silent = TRUE)
    con$served <- NULL
  }
  invisible(NULL)
}

#' @rdname open_atlas
#' @param x An atlas.
print.raggedatlas <- function(x, ...) {
  label <- if (is.null(x$info$label)) "" else paste0(" (", x$info$label, ")")
  count <- function(n) format(n, big.mark = ",")
  cat(
    "<raggedatlas> snapshot ", x$info$snapshot, label, " of ", x$info$uri, "\n", count(x$info$n_cells), " cells of ",
    count(x$info$n_datasets), " datasets\n",
    sep = ""
  )
  invisible(x)
}

#' Datasets, features and cells of an atlas
#'
#' @param atlas What [open_atlas()] returns.
#' @return A data frame. Row names of cells are their uids.
#' @examples
#' \dontrun{
#' atlas_cells(atlas, "cell_type = 'B cell'")
#' }
atlas_datasets <- function(atlas) ask(atlas, "datasets")$frame

#' @rdname atlas_datasets
#' @param space Feature space.
atlas_features <- function(atlas, space = "gene_expression") ask(atlas, "features", list(space = space))$frame

#' @rdname atlas_datasets
#' @param where A condition in SQL on the columns of the cells, `dataset` included; `NULL` takes all cells.
#' @param limit Number of cells at most.
atlas_cells <- function(atlas, where = NULL, limit = NULL) {
  named_rows(ask(atlas, "cells", list(where = where, limit = limit))$frame, "uid")
}

#' Values of features
#'
#' A feature that a dataset did not measure has no value there; the matrix has 0 for it, and `measured` says so.
#'
#' @inheritParams atlas_datasets
#' @param features Ids or symbols of features; `NULL` takes all that any of the cells' datasets measured.
#' @param layer Layer, such as `"counts"`; `NULL` takes that which all datasets share.
#' @param join `"union"` or `"intersection"` of the features of the datasets.
#' @return A list: `matrix`, a `dgCMatrix` of features x cells; `cells` and `features`, data frames; `measured`, a logical matrix of
#'   features x cells' feature lists (`layout_uid` of the cells); `embeddings`, matrices with a row for each cell.
#' @examples
#' \dontrun{
#' found <- atlas_expression(atlas, c("CD79A", "SFTPC"), "dataset = 'lung_C144'")
#' found$matrix
#' }
atlas_expression <- function(atlas, features = NULL, where = NULL, layer = NULL, space = "gene_expression", join = NULL, limit = NULL) {
  asked <- list(where = where, features = as.list(features), layer = layer, space = space, join = join, limit = limit)
  found <- ask(atlas, "expression", asked)
  cells <- named_rows(found$cells, "uid")
  features <- named_rows(found$features, "name")
  parts <- found$matrix
  matrix <- new(
    "dgCMatrix",
    i = parts$i, p = parts$p, x = parts$x, Dim = c(nrow(features), nrow(cells)), Dimnames = list(rownames(features), rownames(cells))
  )
  measured <- as.matrix(found$measured)
  rownames(measured) <- rownames(features)
  keys <- grep("^obsm:", names(found), value = TRUE)
  embeddings <- lapply(found[keys], function(part) {
    values <- as.matrix(part)
    rownames(values) <- rownames(cells)
    values
  })
  names(embeddings) <- sub("^obsm:", "", keys)
  list(matrix = matrix, cells = cells, features = features, measured = measured, embeddings = embeddings)
}

#' Cells as objects of Bioconductor and Seurat
#'
#' @inheritParams atlas_expression
#' @param ... Arguments of [atlas_expression()].
#' @param assay Name of the assay.
#' @return `as_sce` a SingleCellExperiment, with the embeddings as reduced dimensions and `measured` in the metadata; `as_seurat` a Seurat object.
#' @examples
#' \dontrun{
#' sce <- as_sce(atlas, where = "cell_type = 'B cell'")
#' }
as_sce <- function(atlas, ..., assay = "counts") {
  require_package("SingleCellExperiment")
  found <- atlas_expression(atlas, ...)
  SingleCellExperiment::SingleCellExperiment(
    assays = stats::setNames(list(found$matrix), assay), colData = found$cells, rowData = found$features,
    reducedDims = found$embeddings, metadata = list(measured = found$measured, atlas = atlas$info)
  )
}

#' @rdname as_sce
as_seurat <- function(atlas, ..., assay = "RNA") {
  require_package("SeuratObject")
  found <- atlas_expression(atlas, ...)
  # Seurat replaces underscores in names of features itself, with a warning.
  rownames(found$matrix) <- gsub("_", "-", rownames(found$matrix), fixed = TRUE)
  made <- SeuratObject::CreateSeuratObject(found$matrix, assay = assay, meta.data = found$cells, project = "raggedatlas")
  for (key in names(found$embeddings)) {
    values <- found$embeddings[[key]]
    prefix <- paste0(gsub("[^[:alnum:]]", "", sub("^X_", "", key)), "_")
    colnames(values) <- paste0(prefix, seq_len(ncol(values)))
    made[[sub("^X_", "", key)]] <- SeuratObject::CreateDimReducObject(values, key = prefix, assay = assay)
  }
  made
}

# R puts folders of its own before those where programs find their libraries; Python could load another libpython or libssl from there.
without_libraries_of_r <- function(expression) {
  before <- Sys.getenv("LD_LIBRARY_PATH", NA)
  if (!is.na(before)) {
    on.exit(Sys.setenv(LD_LIBRARY_PATH = before))
    paths <- strsplit(before, ":", fixed = TRUE)[[1]]
    own <- c(strsplit(Sys.getenv("R_LD_LIBRARY_PATH"), ":", fixed = TRUE)[[1]], grep(R.home(), paths, fixed = TRUE, value = TRUE))
    others <- setdiff(paths, c(own, "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", grep("/jvm/", paths, fixed = TRUE, value = TRUE)))
    if (length(others)) Sys.setenv(LD_LIBRARY_PATH = paste(others, collapse = ":")) else Sys.unsetenv("LD_LIBRARY_PATH")
  }
  expression
}

require_package <- function(name) {
  if (!requireNamespace(name, quietly = TRUE)) stop("This needs the package ", name, ", which is not installed.", call. = FALSE)
}

named_rows <- function(frame, column) {
  rownames(frame) <- frame[[column]]
  frame[[column]] <- NULL
  frame
}

# Ask the server; answers are described in the package's Python documentation ("Tables server").
ask <- function(atlas, name, body = list()) {
  if (is.null(atlas$served)) stop("The atlas was closed; open it again with open_atlas().", call. = FALSE)
  body <- body[!vapply(body, is.null, logical(1))]
  body <- body[lengths(body) > 0]
  text <- if (length(body)) as.character(jsonlite::toJSON(body, auto_unbox = TRUE, digits = NA)) else "{}"
  handle <- curl::new_handle(noproxy = "*")
  curl::handle_setopt(handle, post = TRUE, postfields = text)
  curl::handle_setheaders(handle, "Content-Type" = "application/json")
  answer <- curl::curl_fetch_memory(paste0(atlas$url, name), handle = handle)
  if (answer$status_code != 200) stop(rawToChar(answer$content), call. = FALSE)
  if (name %in% c("info", "close")) jsonlite::fromJSON(rawToChar(answer$content)) else decode(answer$content)
}

decode <- function(bytes) {
  input <- rawConnection(bytes)
  on.exit(close(input))
  n_head <- readBin(input, "integer", 1, 4, endian = "little")
  text <- rawToChar(readBin(input, "raw", n_head))
  Encoding(text) <- "UTF-8"
  head <- jsonlite::fromJSON(text, simplifyVector = FALSE)
  lapply(head, function(part) {
    names <- vapply(part$columns, function(column) column$name, "")
    columns <- lapply(part$columns, function(column) read_column(input, column))
    names(columns) <- names
    if (all(lengths(columns) == part$n_rows)) as_frame(columns, part$n_rows) else columns
  })
}

as_frame <- function(columns, n_rows) {
  structure(columns, class = "data.frame", row.names = .set_row_names(n_rows), names = as.character(names(columns)))
}

read_column <- function(input, column) {
  n <- column$n
  if (column$type == "double") return(readBin(input, "double", n, 8, endian = "little"))
  codes <- readBin(input, "integer", n, 4, endian = "little")
  levels <- vapply(column$levels, identity, "")
  switch(column$type,
    integer = codes,
    logical = as.logical(codes),
    text = levels[codes],
    factor = structure(codes, levels = as.character(levels), class = c(if (isTRUE(column$ordered)) "ordered", "factor"))
  )
}
