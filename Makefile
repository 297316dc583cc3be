# spk - pack a GGUF model once, decode from the pack.
#
#   make            build the tools into build/bin
#   make demo       pack the bundled model, decode, compare: one screenful
#   make test       all tests
#   make CUDA=1     with the GPU backend (nvcc; CUDA_ARCH=90 is the default), in build/cuda
#   make SAN=1 ...  the same with AddressSanitizer and UndefinedBehaviorSanitizer, in build/san
#   make V=1        show commands
.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules
Q := $(if $(V),,@)
comma := ,

ifeq ($(origin CC),default)
CC := cc
endif
SAN ?= 0
CUDA ?= 0
CUDA_ARCH ?= 90
NVCC ?= $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
ifeq ($(CUDA)/$(NVCC),1/)
$(error CUDA=1, but nvcc was not found: set NVCC=/path/to/nvcc)
endif
ARCH := $(shell uname -m)

# One directory per configuration, so that two of them never mix.
BUILD := build$(if $(filter 1,$(CUDA)),/cuda)$(if $(filter 1,$(SAN)),/san)
OBJ   := $(BUILD)/obj
BIN   := $(BUILD)/bin
TBIN  := $(BUILD)/tests

WARN   := -Wall -Wextra -Wconversion -Wshadow -Wcast-align -Wstrict-prototypes -Wmissing-prototypes -Wundef -Wvla \
          -Wformat=2 $(if $(NO_WERROR),,-Werror)
CFLAGS ?= -O3 -g
# No contraction anywhere: results must not depend on the compiler's choice to fuse.
ALL_CFLAGS = -std=c11 -D_GNU_SOURCE -I. $(WARN) -ffp-contract=off -fno-math-errno -pthread -MMD -MP $(CFLAGS)
LDLIBS := -lzstd -lxxhash -lpcre2-8 -lcjson -lm -lpthread
ifeq ($(SAN),1)
ALL_CFLAGS += -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
LDFLAGS    += -fsanitize=address,undefined
endif

# Sources are chosen by suffix: X_main.c is a tool, X_avx2.c needs AVX2 at run time, X_lanes.c is compiled three times
# (plain, AVX2, AVX-512; see requant/quant.h), everything else is library.
LIB_SRC   := $(filter-out %_main.c %_avx2.c %_stub.c,$(wildcard formats/*.c requant/*.c kernels/*.c runtime/*.c))
LANES_SRC := $(filter %_lanes.c,$(LIB_SRC))
LIB_OBJ   := $(LIB_SRC:%.c=$(OBJ)/%.o)
ifeq ($(ARCH),x86_64)
LIB_OBJ   += $(patsubst %.c,$(OBJ)/%.o,$(wildcard kernels/*_avx2.c)) $(LANES_SRC:%_lanes.c=$(OBJ)/%_lanes_avx2.o) \
             $(LANES_SRC:%_lanes.c=$(OBJ)/%_lanes_avx512.o)
AVX2_FLAGS := -mavx2 -mfma -mf16c
endif
LIB_OBJ   += $(OBJ)/requant/recipes_builtin.o
ifeq ($(CUDA),1)
LIB_OBJ   += $(patsubst %.cu,$(OBJ)/%.o,$(wildcard kernels/*_cuda.cu))
LDLIBS    += -L$(patsubst %/bin/,%,$(dir $(NVCC)))/lib64 -lcudart_static -lstdc++ -ldl -lrt
else
LIB_OBJ   += $(OBJ)/kernels/cuda_stub.o
endif
LIB       := $(OBJ)/libspk.a
TOOL_MAIN := $(wildcard formats/*_main.c requant/*_main.c kernels/*_main.c runtime/*_main.c)
TOOLS     := $(foreach m,$(TOOL_MAIN),$(BIN)/spk-$(subst _,-,$(patsubst %_main.c,%,$(notdir $(m)))))
TEST_SRC  := $(wildcard tests/test_*.c)
TESTS     := $(TEST_SRC:tests/%.c=$(TBIN)/%) $(TBIN)/checkkern
TEST_SH   := $(sort $(wildcard tests/test_*.sh))
TEST_MODEL := build/models/tiny-qwen36-bf16.gguf
RECIPES   := $(sort $(wildcard packs/*/*.recipe))

.PHONY: all deps info demo test peer-test bench clean help
all: info $(TOOLS)      ## build the tools into build/bin

info: | deps
	@echo "spk: cc=$(CC) arch=$(ARCH) sanitizers=$(SAN); $(if $(AVX2_FLAGS),AVX2 and VNNI kernels built$(comma) chosen at run time,reference kernels only); GPU backend $(if $(filter 1,$(CUDA)),built for sm_$(CUDA_ARCH),not built: make CUDA=1); tools in $(BIN)"

# Debian packages, installed only when a header is missing.
DEPS_STAMP := build/deps.ok
deps: $(DEPS_STAMP)     ## install missing Debian packages (root or sudo)
$(DEPS_STAMP): Makefile
	$(Q)mkdir -p $(@D)
	$(Q)need=; for p in zstd.h:libzstd-dev xxhash.h:libxxhash-dev pcre2.h:libpcre2-dev cjson/cJSON.h:libcjson-dev; do \
	  printf '#define PCRE2_CODE_UNIT_WIDTH 8\n#include <stdio.h>\n#include <%s>\n' "$${p%%:*}" | $(CC) -E -x c - >/dev/null 2>&1 || need="$$need $${p##*:}"; done; \
	command -v zstd >/dev/null || need="$$need zstd"; \
	if [ -n "$$need" ]; then echo "spk: installing$$need"; \
	  sudo=; [ "$$(id -u)" -eq 0 ] || sudo=sudo; \
	  $$sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -y -qq $$need >/dev/null || \
	  { echo "spk: please install:$$need" >&2; exit 1; }; fi
	$(Q)touch $@

$(LIB): $(LIB_OBJ)
	$(Q)rm -f $@ && $(AR) rcs $@ $^

define tool_rule
$(BIN)/spk-$(subst _,-,$(patsubst %_main.c,%,$(notdir $(1)))): $(OBJ)/$(1:.c=.o) $(LIB)
	$$(Q)mkdir -p $$(@D) && $$(CC) $$(LDFLAGS) -o $$@ $$^ $$(LDLIBS)
endef
$(foreach m,$(TOOL_MAIN),$(eval $(call tool_rule,$(m))))

$(TBIN)/%: $(OBJ)/tests/%.o $(LIB)
	$(Q)mkdir -p $(@D) && $(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

$(OBJ)/kernels/%_avx2.o: ALL_CFLAGS += $(AVX2_FLAGS)
$(OBJ)/%_lanes_avx2.o: %_lanes.c Makefile | deps
	$(Q)mkdir -p $(@D) && $(CC) $(ALL_CFLAGS) -mavx2 -DSPK_LANES_AVX2 -c -o $@ $<
$(OBJ)/%_lanes_avx512.o: %_lanes.c Makefile | deps
	$(Q)mkdir -p $(@D) && $(CC) $(ALL_CFLAGS) -mavx2 -mavx512f -mavx512vl -mavx512dq -mavx512bw -mprefer-vector-width=256 \
	  -DSPK_LANES_AVX2 -DSPK_LANES_AVX512 -c -o $@ $<
$(OBJ)/%.o: %.c Makefile | deps
	$(Q)mkdir -p $(@D) && $(CC) $(ALL_CFLAGS) -c -o $@ $<

$(OBJ)/%.o: %.cu Makefile | deps
	$(Q)mkdir -p $(@D) && $(NVCC) -O3 -std=c++17 -arch=sm_$(CUDA_ARCH) -lineinfo -I. -MMD -MP -c -o $@ $<

# packs/*/*.recipe as C strings: { path, text }, sorted by path.
$(OBJ)/requant/recipes_builtin.c: $(RECIPES) Makefile
	$(Q)mkdir -p $(@D) && { echo '#include "requant/recipes_builtin.h"'; echo 'const spk_builtin_recipe spk_builtin_recipes[] = {'; \
	  for f in $(RECIPES); do printf '{ "%s",\n' "$$f"; sed -e 's/\\/\\\\/g' -e 's/"/\\"/g' -e 's/.*/  "&\\n"/' "$$f"; echo '},'; done; \
	  echo '{ 0, 0 } };'; } > $@
$(OBJ)/requant/recipes_builtin.o: $(OBJ)/requant/recipes_builtin.c
	$(Q)$(CC) $(ALL_CFLAGS) -c -o $@ $<

$(TEST_MODEL): tests/models/tiny-qwen36-bf16.gguf.zst | deps
	$(Q)mkdir -p $(@D) && zstd -q -d -f -o $@ $<

test: all $(TESTS) $(TEST_MODEL)     ## all tests; the last line counts them, the exit status is the verdict
	$(Q)tests/run.sh $(BIN) $(TBIN) $(TESTS) $(TEST_SH)

demo: all               ## pack the bundled trained model, decode from the pack, compare with the native weights
	$(Q)tests/demo.sh $(BIN)

peer-test: all          ## compare logits and token ids with llama.cpp, fetched from the npm registry
	$(Q)tests/peer/run.sh $(BIN)

bench: all $(TBIN)/checkkern         ## check, then time, every kernel; then decode and prefill of the bundled model
	$(Q)$(TBIN)/checkkern --bench
	$(Q)$(BIN)/spk-bench packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf

clean:                  ## remove build/
	rm -rf build

help:                   ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n",$$1,$$2}' $(firstword $(MAKEFILE_LIST))

.SECONDARY:
-include $(shell find $(OBJ) -name '*.d' 2>/dev/null)
