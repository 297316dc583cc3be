/* requant/convert_device.c - on which device the weights of a conversion are quantized. */
#include "formats/census.h"
#include "requant/convert.h"

/* Below this a GPU is not worth the half second that its driver takes to start. */
#define AUTO_WEIGHTS_MIN (UINT64_C(1) << 28)

static uint64_t requantized_weights(const spk_convert_plan *plan) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < plan->tensor_count; i++) {
        const spk_tensor *t = &plan->tensors[i];
        if (spk_tensor_is_requantized(t)) sum += t->dims[0] * t->dims[1] * spk_tensor_matrix_count(t);
    }
    return sum;
}

spk_status spk_convert_choose_device(spk_convert_device device, const spk_convert_options *options,
                                     const spk_convert_plan *plan, bool *on_gpu, char name[SPK_QUANT_GPU_NAME_SIZE],
                                     spk_error *err) {
    *on_gpu = false;
    if (device == SPK_DEVICE_CPU) return SPK_OK;
    if (device == SPK_DEVICE_AUTO && (options->calibration != NULL || requantized_weights(plan) < AUTO_WEIGHTS_MIN))
        return SPK_OK;
    spk_error why;
    spk_status status = spk_quant_gpu_find(name, &why);
    *on_gpu = status == SPK_OK;
    if (status == SPK_OK || device == SPK_DEVICE_AUTO) return SPK_OK;
    return spk_fail(err, status, "--device cuda: %s", why.text);
}
