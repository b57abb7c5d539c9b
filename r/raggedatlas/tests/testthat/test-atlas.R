# RAGGEDATLAS_TEST_ATLAS is an atlas or the address of a published one; RAGGEDATLAS_TEST_EXPECTED a folder with what Python reads of it.
address <- Sys.getenv("RAGGEDATLAS_TEST_ATLAS")
folder <- Sys.getenv("RAGGEDATLAS_TEST_EXPECTED")
if (!nzchar(address)) skip("RAGGEDATLAS_TEST_ATLAS is not set")
atlas <- open_atlas(address)
expected <- function(name) jsonlite::fromJSON(file.path(folder, name))

test_that("frames are those of Python", {
  wanted <- expected("facts.json")
  expect_s3_class(atlas, "raggedatlas")
  expect_output(print(atlas), "snapshot 1 \\(v1\\)")
  expect_equal(atlas_datasets(atlas)$name, wanted$datasets)
  cells <- atlas_cells(atlas)
  expect_equal(nrow(cells), wanted$n_cells)
  expect_equal(sum(cells$n_counts, na.rm = TRUE), wanted$n_counts)
  expect_equal(sum(is.na(cells$n_counts)), wanted$n_missing)
  expect_equal(as.character(cells$dataset[1:3]), wanted$first_datasets)
  expect_equal(nrow(atlas_features(atlas)), wanted$n_features)
  expect_equal(nrow(atlas_cells(atlas, limit = 5)), 5)
})

test_that("values are those of Python, and what was measured is known", {
  wanted <- expected("values.json")
  found <- atlas_expression(atlas, wanted$features)
  expect_s4_class(found$matrix, "dgCMatrix")
  expect_true(methods::validObject(found$matrix))
  expect_equal(unname(as.matrix(found$matrix)), unname(t(wanted$values)))
  expect_equal(colnames(found$matrix), wanted$cells)
  expect_equal(unname(found$measured), wanted$measured)
  expect_equal(sort(colnames(found$measured)), sort(unique(as.character(found$cells$layout_uid))))
  part <- atlas_expression(atlas, wanted$features[1], where = paste0("dataset = '", expected("facts.json")$datasets[1], "'"))
  expect_equal(nrow(part$matrix), 1)
})

test_that("refusals are those of Python", {
  expect_error(atlas_cells(atlas, "no_such_column = 1"), "no_such_column")
  expect_error(atlas_expression(atlas, "NO_SUCH_GENE"), "NO_SUCH_GENE")
  expect_error(open_atlas(file.path(tempdir(), "nothing")), "no atlas")
  expect_error(open_atlas(address, command = "no-such-command"), "pip install")
})

test_that("there are objects of Bioconductor and Seurat", {
  wanted <- expected("values.json")
  skip_if_not_installed("SingleCellExperiment")
  sce <- as_sce(atlas, wanted$features)
  expect_equal(dim(sce), rev(dim(wanted$values)))
  expect_equal(colnames(sce), wanted$cells)
  expect_equal(SingleCellExperiment::reducedDimNames(sce), as.character(unlist(wanted$embeddings)))
  skip_if_not_installed("SeuratObject")
  seurat <- as_seurat(atlas, wanted$features)
  expect_equal(dim(seurat), rev(dim(wanted$values)))
})

test_that("a closed atlas says so", {
  close(atlas)
  expect_error(atlas_datasets(atlas), "closed")
})
