// The checks of grouped_mlp's arguments.
#pragma once

#include "linear/grouped_mlp_activation.h"

namespace transformer_plugin::linear {

OperandFormats check_grouped_mlp(const MlpArguments& mlp, std::string_view input_format,
                                 std::string_view weight_format, std::string_view grad_format);
// What the ops called below would refuse. `columns`: for weight gradients.
void check_quantizable(const MlpArguments& mlp, const OperandFormats& formats, bool columns);

}  // namespace transformer_plugin::linear
