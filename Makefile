# spk - pack a GGUF model once, decode from the pack.
#
#   make            build the tools into build/bin, with the GPU backend where there is an nvcc
#   make demo       pack the bundled model, decode, compare: one screenful
#   make test       all tests
#   make CUDA=0     without the GPU backend; CUDA=1: an error where there is no nvcc; NVCC=/path/to/nvcc: that one
#   make CUDA_ARCH=90     GPU code for sm_90 alone, or for a list: CUDA_ARCH="80 90"
#   make SAN=1 ...  the same with AddressSanitizer and UndefinedBehaviorSanitizer, in build/san
#   make SAN=thread ...   with ThreadSanitizer, in build/tsan
#   make V=1        show commands
.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules
Q := $(if $(V),,@)
comma := ,
space := $() $()

ifeq ($(origin CC),default)
CC := cc
endif
SAN ?= 0
ARCH := $(shell uname -m)
BUILD := build$(if $(filter 1,$(SAN)),/san)$(if $(filter thread,$(SAN)),/tsan)
OBJ   := $(BUILD)/obj
BIN   := $(BUILD)/bin
TBIN  := $(BUILD)/tests

WARN   := -Wall -Wextra -Wconversion -Wshadow -Wcast-align -Wstrict-prototypes -Wmissing-prototypes -Wundef -Wvla \
          -Wformat=2 $(if $(NO_WERROR),,-Werror)
CFLAGS ?= -O3 -g
# No contraction anywhere: results must not depend on the compiler's choice to fuse.
ALL_CFLAGS = -std=c11 -D_GNU_SOURCE -I. $(WARN) -ffp-contract=off -fno-math-errno -pthread -MMD -MP $(CFLAGS)
LDLIBS := -lzstd -lxxhash -lpcre2-8 -lcjson -lm -lpthread
HOST_LDLIBS := $(LDLIBS)

# ---- The GPU backend ----
NVCC ?= $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
CUDA ?= $(if $(NVCC),1,0)
$(if $(filter 0 1,$(CUDA)),,$(error CUDA=$(CUDA): expected 0 or 1))
ifeq ($(CUDA),1)
ifeq ($(shell command -v "$(NVCC)" 2>/dev/null),)
$(error CUDA=1, but there is no nvcc$(if $(NVCC), at $(NVCC),): set NVCC=/path/to/nvcc, or CUDA=0)
endif
# Every kind of GPU that the kernels are for and this nvcc knows, and PTX from which later ones are compiled.
ifeq ($(origin CUDA_ARCH),undefined)
NVCC_KNOWS := $(patsubst sm_%,%,$(shell $(NVCC) --list-gpu-code 2>/dev/null))
CUDA_ARCH  := $(filter $(or $(NVCC_KNOWS),%),80 86 89 90 100 120)
endif
ifneq ($(if $(strip $(CUDA_ARCH)),$(filter-out 80 86 87 89 90 100 103 120 121,$(CUDA_ARCH)),none),)
$(error CUDA_ARCH="$(CUDA_ARCH)": expected numbers of 80 86 87 89 90 100 103 120 121, such as "80 90")
endif
CUDA_NEWEST := $(lastword $(shell printf '%s\n' $(CUDA_ARCH) | sort -n))
# Where nvcc itself links from: the nvcc in PATH may be a script that starts one elsewhere.
CUDA_LIB   := $(firstword $(wildcard $(addsuffix /libcudart_static.a,$(patsubst -L%,%,$(filter -L%,$(subst ",,$(shell \
              $(NVCC) --dryrun -x cu /dev/null -o /dev/null 2>&1 | sed -n 's/^.. LIBRARIES=//p')))))) -lcudart_static)
# ptxas -v: kernels/ptxas.awk fails the build where a kernel spills.
NVCCFLAGS  := -O3 -std=c++17 -lineinfo -I. --threads 2 $(foreach a,$(CUDA_ARCH),-gencode arch=compute_$a,code=sm_$a) \
              -gencode arch=compute_$(CUDA_NEWEST),code=compute_$(CUDA_NEWEST) -Xptxas -v -Xcompiler -Wall,-Wextra \
              $(if $(NO_WERROR),,-Werror all-warnings$(comma)default-stream-launch)
CUDA_SAYS  := built by $(NVCC) for sm_$(subst $(space),$(comma) ,$(strip $(CUDA_ARCH))) and PTX
else
CUDA_SAYS  := not built: $(if $(NVCC),CUDA=$(CUDA),no nvcc in PATH or /usr/local/cuda/bin; NVCC=/path/to/nvcc names one)
endif

ifeq ($(SAN),1)
ALL_CFLAGS += -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
LDFLAGS    += -fsanitize=address,undefined
endif

ifeq ($(SAN),thread)
ALL_CFLAGS += -O1 -fsanitize=thread -fno-omit-frame-pointer
LDFLAGS    += -fsanitize=thread
endif

ifeq ($(COVERAGE),1)
ALL_CFLAGS += -O0 --coverage
LDFLAGS    += --coverage
endif

# A build of the fuzzers for clang's libFuzzer; `make fuzz` makes it.
ifeq ($(FUZZ_BUILD),1)
ALL_CFLAGS += -w -O1 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -DSPK_LIBFUZZER
LDFLAGS    += -fsanitize=fuzzer,address,undefined
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
CUDA_SRC   := $(wildcard kernels/*_cuda.cu requant/*_cuda.cu)
CUDA_STUBS := $(OBJ)/kernels/cuda_stub.o $(OBJ)/requant/quant_gpu_stub.o
ifeq ($(CUDA),1)
LIB_OBJ   += $(patsubst %.cu,$(OBJ)/%.o,$(CUDA_SRC))
LDLIBS    += $(CUDA_LIB) -lsupc++ -ldl -lrt
else
LIB_OBJ   += $(CUDA_STUBS)
endif
LIB       := $(OBJ)/libspk.a
TOOL_MAIN := $(wildcard formats/*_main.c requant/*_main.c kernels/*_main.c runtime/*_main.c)
TOOLS     := $(foreach m,$(TOOL_MAIN),$(BIN)/spk-$(subst _,-,$(patsubst %_main.c,%,$(notdir $(m)))))
TEST_SRC  := $(wildcard tests/test_*.c)
TESTS     := $(TEST_SRC:tests/%.c=$(TBIN)/%) $(TBIN)/checkkern
# Fuzzers (tests/fuzz.h): as tests they are ordinary programs, for some seconds each.
FUZZERS   := $(patsubst tests/%.c,%,$(wildcard tests/fuzz_*.c))
TESTS     += $(FUZZERS:%=$(TBIN)/%)
# Tests that need a GPU: in C against libspk.a, in CUDA C where there is an nvcc.  Without a GPU they end with status 77.
TESTS     += $(patsubst tests/%.c,$(TBIN)/%,$(wildcard tests/gpu_*.c))
GPU_TEST_CU := $(wildcard tests/gpu_*.cu)
ifeq ($(CUDA),1)
TESTS     += $(GPU_TEST_CU:tests/%.cu=$(TBIN)/%)
TEST_NOT_BUILT :=
else
TEST_NOT_BUILT := $(GPU_TEST_CU)
endif
TEST_SH   := $(sort $(wildcard tests/test_*.sh))
# The CUDA kernels on the CPU, where there is a C++ compiler (tests/emulator): the GPU's tests, for each variant of the device.
# Under sanitizers only with SAN=1 EMULATE=1.
EMULATED  := checkkern gpu_sample gpu_layers gpu_generate gpu_attention gpu_quant
EMULATE   ?= $(if $(filter 1,$(SAN)),0,$(if $(shell command -v "$(CXX)" 2>/dev/null),1,0))
EMU       := $(BUILD)/emulate
EMU_90    := -D__CUDA_ARCH__=900
EMU_80    := -D__CUDA_ARCH__=800
EMU_races := -D__CUDA_ARCH__=900 -DSPK_EMULATOR_RACES
EMU_VARIANTS := $(if $(filter 1,$(EMULATE)),90 80 $(if $(filter 1,$(SAN)),,races))
EMU_FLAGS := -std=c++17 -O2 -g -D_GNU_SOURCE -Itests/emulator/include -I. -Wall -Wextra $(if $(NO_WERROR),,-Werror) -ffp-contract=off -pthread \
             -MMD -MP $(if $(filter 1,$(SAN)),-O1 -fsanitize=address$(comma)undefined -fno-sanitize-recover=all -fsanitize-sections=spk_shared)
# As nvcc, which takes pointers of any type to any memory, unrolls where it is told, and does not see device code as the host's.
EMU_CUDA_FLAGS := -x c++ -fno-strict-aliasing -Wno-unknown-pragmas -Wno-sign-compare -Wno-unused-parameter \
                  -Wno-missing-field-initializers -Wno-enum-compare
EMU_PROGRAMS   := $(foreach v,$(EMU_VARIANTS),$(EMULATED:%=$(EMU)/$v/%)) $(if $(EMU_VARIANTS),$(EMU)/90/spk-pack)
TEST_MODEL := build/models/tiny-qwen36-bf16.gguf
RECIPES   := $(sort $(wildcard packs/*/*.recipe))

.PHONY: all deps info demo test emulate fuzz tsan coverage peer-test bench gpu-proof clean help FORCE
all: info $(TOOLS)      ## build the tools into build/bin

info: | deps
	@echo "spk: cc=$(CC) arch=$(ARCH) sanitizers=$(SAN); $(if $(AVX2_FLAGS),AVX2 and VNNI kernels built$(comma) chosen at run time,reference kernels only); GPU backend $(CUDA_SAYS); tools in $(BIN)"

# Debian packages, installed only when a header is missing.
DEPS_STAMP := build/deps-cuda$(CUDA).ok
deps: $(DEPS_STAMP)     ## install missing Debian packages (root or sudo)
$(DEPS_STAMP): Makefile
	$(Q)mkdir -p $(@D)
	$(Q)need=; for p in zstd.h:libzstd-dev xxhash.h:libxxhash-dev pcre2.h:libpcre2-dev cjson/cJSON.h:libcjson-dev; do \
	  printf '#define PCRE2_CODE_UNIT_WIDTH 8\n#include <stdio.h>\n#include <%s>\n' "$${p%%:*}" | $(CC) -E -x c - >/dev/null 2>&1 || need="$$need $${p##*:}"; done; \
	command -v zstd >/dev/null || need="$$need zstd"; \
	[ $(CUDA) = 0 ] || command -v g++ >/dev/null || need="$$need g++"; \
	if [ -n "$$need" ]; then echo "spk: installing$$need"; \
	  sudo=; [ "$$(id -u)" -eq 0 ] || sudo=sudo; \
	  $$sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -y -qq $$need >/dev/null || \
	  { echo "spk: please install:$$need" >&2; exit 1; }; fi
	$(Q)touch $@

# A file that holds a text and changes when the text does: what is made from other objects, or with other flags, is made anew.
define text_rule
$(1): FORCE
	$$(Q)mkdir -p $$(@D) && echo '$(2)' | cmp -s - $$@ || echo '$(2)' >$$@
endef
$(eval $(call text_rule,$(OBJ)/library.text,$(LIB_OBJ)))
$(eval $(call text_rule,$(OBJ)/nvcc.text,$(NVCC) $(NVCCFLAGS)))
$(eval $(call text_rule,$(OBJ)/link.text,$(LDLIBS)))   # read by tests/peer/common.sh
FORCE:

$(LIB): $(LIB_OBJ) $(OBJ)/library.text $(OBJ)/link.text
	$(Q)rm -f $@ && $(AR) rcs $@ $(LIB_OBJ)

define tool_rule
$(BIN)/spk-$(subst _,-,$(patsubst %_main.c,%,$(notdir $(1)))): $(OBJ)/$(1:.c=.o) $(LIB)
	$$(Q)mkdir -p $$(@D) && $$(CC) $$(LDFLAGS) -o $$@ $$^ $$(LDLIBS)
endef
$(foreach m,$(TOOL_MAIN),$(eval $(call tool_rule,$(m))))

# tests/faults.h: these calls of the library go through the test.
FAULT_WRAPS := malloc calloc realloc aligned_alloc free strdup strndup asprintf realpath open_memstream XXH3_createState \
               XXH3_freeState ZSTD_compress ZSTD_decompress pcre2_match_data_create_8 open fopen fdopen fstat fstatvfs pread \
               read fread pwrite fsync ftruncate rename renameat2 mmap madvise munmap pthread_create pthread_join
$(TBIN)/test_faults: LDFLAGS += $(FAULT_WRAPS:%=-Wl$(comma)--wrap=%)

$(TBIN)/%: $(OBJ)/tests/%.o $(LIB)
	$(Q)mkdir -p $(@D) && $(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

# emulator_rule VARIANT: its objects in build/emulate/VARIANT, its programs too.
define emulator_rule
$(EMU)/$(1)/obj/%.o: %.cpp Makefile | deps
	$$(Q)mkdir -p $$(@D) && $$(CXX) $$(EMU_FLAGS) $$(EMU_$(1)) -c -o $$@ $$<
$(EMU)/$(1)/obj/%.o: %.cu Makefile | deps
	$$(Q)mkdir -p $$(@D) && $$(CXX) $$(EMU_FLAGS) $$(EMU_CUDA_FLAGS) $$(EMU_$(1)) $(if $(filter races,$(1)),-fsanitize=thread) -c -o $$@ $$<
$(EMU)/$(1)/libspk.a: $$(patsubst %.cpp,$(EMU)/$(1)/obj/%.o,$(filter-out $(if $(filter races,$(1)),,%/races.cpp),$(wildcard tests/emulator/*.cpp))) \
    $$(patsubst %.cu,$(EMU)/$(1)/obj/%.o,$(CUDA_SRC)) $(filter-out $(CUDA_SRC:%.cu=$(OBJ)/%.o) $(CUDA_STUBS),$(LIB_OBJ))
	$$(Q)rm -f $$@ && $$(AR) rcs $$@ $$^
$(EMU)/$(1)/%: $(OBJ)/tests/%.o $(EMU)/$(1)/libspk.a
	$$(Q)$$(CXX) $$(LDFLAGS) -o $$@ $$^ $$(HOST_LDLIBS) -ldl
$(EMU)/$(1)/spk-pack: $(OBJ)/requant/pack_main.o $(EMU)/$(1)/libspk.a
	$$(Q)$$(CXX) $$(LDFLAGS) -o $$@ $$^ $$(HOST_LDLIBS) -ldl
endef
$(foreach v,$(EMU_VARIANTS),$(eval $(call emulator_rule,$v)))

$(OBJ)/kernels/%_avx2.o: ALL_CFLAGS += $(AVX2_FLAGS)
$(OBJ)/%_lanes_avx2.o: %_lanes.c Makefile | deps
	$(Q)mkdir -p $(@D) && $(CC) $(ALL_CFLAGS) -mavx2 -mfma -DSPK_LANES_AVX2 -c -o $@ $<
$(OBJ)/%_lanes_avx512.o: %_lanes.c Makefile | deps
	$(Q)mkdir -p $(@D) && $(CC) $(ALL_CFLAGS) -mavx2 -mfma -mavx512f -mavx512vl -mavx512dq -mavx512bw -mprefer-vector-width=256 \
	  -DSPK_LANES_AVX2 -DSPK_LANES_AVX512 -c -o $@ $<
$(OBJ)/%.o: %.c Makefile | deps
	$(Q)mkdir -p $(@D) && $(CC) $(ALL_CFLAGS) -c -o $@ $<

# The GPU's quantizers are the CPU's source and give its bytes: no contraction there either.
$(OBJ)/requant/%_cuda.o: NVCCFLAGS += -fmad=false
# The report of ptxas stays beside the object: registers, shared memory and spills of every kernel.
$(OBJ)/%.o: %.cu kernels/ptxas.awk $(OBJ)/nvcc.text Makefile | deps
	$(Q)mkdir -p $(@D); $(NVCC) $(NVCCFLAGS) -MMD -MP -c -o $@ $< >$(@:.o=.ptxas) 2>&1; status=$$?; \
	  awk -v lenient=$(if $(NO_WERROR),1,0) -f kernels/ptxas.awk $(@:.o=.ptxas) >&2 && exit $$status

# packs/*/*.recipe as C strings: { path, text }, sorted by path.
$(OBJ)/requant/recipes_builtin.c: $(RECIPES) Makefile
	$(Q)mkdir -p $(@D) && { echo '#include "requant/recipes_builtin.h"'; echo 'const spk_builtin_recipe spk_builtin_recipes[] = {'; \
	  for f in $(RECIPES); do printf '{ "%s",\n' "$$f"; sed -e 's/\\/\\\\/g' -e 's/"/\\"/g' -e 's/.*/  "&\\n"/' "$$f"; echo '},'; done; \
	  echo '{ 0, 0 } };'; } > $@
$(OBJ)/requant/recipes_builtin.o: $(OBJ)/requant/recipes_builtin.c
	$(Q)$(CC) $(ALL_CFLAGS) -c -o $@ $<

$(TEST_MODEL): tests/models/tiny-qwen36-bf16.gguf.zst | deps
	$(Q)mkdir -p $(@D) && zstd -q -d -f -o $@ $<

test: all $(TESTS) $(TEST_MODEL) $(EMU_PROGRAMS)     ## all tests; the last line counts them, the exit status is the verdict
	$(Q)tests/run.sh $(BIN) $(TBIN) $(TESTS) $(TEST_SH) $(TEST_NOT_BUILT)

demo: all               ## pack the bundled trained model, decode from the pack, compare with the native weights
	$(Q)tests/demo.sh $(BIN)

emulate: $(EMU_PROGRAMS) ## the CUDA kernels on the CPU, in many orders, with planted faults: a quarter of an hour
	$(Q)SPK_TEST_BIN=$(TBIN) CXX="$(CXX)" tests/test_emulated.sh --long

peer-test: all          ## compare logits and token ids with llama.cpp, fetched from the npm registry
	$(Q)tests/peer/run.sh $(BIN)

bench: all $(TBIN)/checkkern         ## check, then time, every kernel; then decode and prefill of the bundled model
	$(Q)$(TBIN)/checkkern --bench
	$(Q)$(BIN)/spk-bench packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf

FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= $(FUZZERS)
fuzz: $(FUZZERS:%=$(TBIN)/%) | deps  ## FUZZ_SECONDS=n seconds of each fuzzer, with libFuzzer where there is clang
	$(Q)$(if $(shell command -v clang),$(MAKE) --no-print-directory CC=clang CUDA=0 BUILD=build/fuzz FUZZ_BUILD=1 NO_WERROR=1 \
	  $(FUZZ_TARGETS:%=build/fuzz/tests/%) &&) tests/fuzz.sh $(TBIN) $(FUZZ_SECONDS) $(FUZZ_TARGETS)

TSAN_TESTS := test_endurance test_pool test_convert test_source_weights
tsan:                   ## what has threads, under ThreadSanitizer
	$(Q)$(MAKE) --no-print-directory SAN=thread CUDA=0 NO_WERROR=1 $(TSAN_TESTS:%=build/tsan/tests/%)
	$(Q)tests/run.sh build/tsan/bin build/tsan/tests $(TSAN_TESTS:%=build/tsan/tests/%)

COVERAGE_TESTS := $(patsubst tests/%.c,build/coverage/tests/%,$(wildcard $(addprefix tests/test_,gguf.c malformed.c spk.c spk_damage.c \
                  outfile.c interrupted.c full_disk.c faults.c repair.c layout.c dequant.c blocks.c model.c utf8.c html.c cli.c pool.c unpack.c \
                  convert.c config.c plain.c name_index.c)) $(wildcard tests/fuzz_*.c)) $(addprefix tests/test_,info.sh pack.sh report.sh)
coverage: $(TEST_MODEL) ## lines and branches of formats/ that the tests and the fuzzers' seeds reach (gcov)
	$(Q)$(MAKE) --no-print-directory COVERAGE=1 CUDA=0 BUILD=build/coverage NO_WERROR=1 all $(filter build/%,$(COVERAGE_TESTS))
	$(Q)tests/coverage.sh build/coverage $(COVERAGE_TESTS)

gpu-proof: all $(TESTS) ## on a machine with a GPU: accuracy, sanitizers, speed and load time in one table
	$(Q)BIN=$(BIN) tests/gpu_proof.sh

clean:                  ## remove build/
	rm -rf build

help:                   ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n",$$1,$$2}' $(firstword $(MAKEFILE_LIST))

.SECONDARY:
-include $(shell find $(OBJ) $(EMU) -name '*.d' 2>/dev/null)
