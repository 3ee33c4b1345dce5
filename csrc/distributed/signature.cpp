// What ranks tell each other through the store: texts, and the kinds of calls that they make. No device takes part, so
// that it serves CUDA, where the host waits for nothing, once for each new kind, and tests on a CPU.
#include <c10/util/Exception.h>

#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "distributed/group_state.h"

namespace transformer_plugin::expert_parallel {

std::vector<std::string> exchange_texts(GroupState& state, const char* kind, int64_t turn,
                                        const std::string& text, Phase phase, const std::string& place,
                                        Milliseconds timeout) {
  struct Round {
    std::string prefix;
    std::string text;
    int64_t rank;
    int64_t size;
    int64_t end;
    std::vector<std::string> texts;
    bool given = false;
  };
  const std::string prefix = state.keys() + kind + "/" + std::to_string(turn) + "/";
  const int64_t end = steady_ms() + timeout.count();
  const auto round = std::make_shared<Round>(Round{prefix, text, state.rank, state.size, end, {}});
  const auto talk = [round, roll = state.roll(kind), verdict = state.keys() + "verdict", turn,
                     place](c10d::Store& store) {
    store.set(round->prefix + std::to_string(round->rank), round->text);
    int64_t last_beat = steady_ms();
    for (int64_t r = 0; r < round->size; ++r) {
      const std::string key = round->prefix + std::to_string(r);
      while (!store.check({key})) {
        const int64_t now = steady_ms();
        if (round->given || now >= round->end) return;
        if (now - last_beat >= kBeat.count()) {
          last_beat = now;
          round->given = roll.beat(store, turn, place);
        }
        std::this_thread::sleep_for(Milliseconds(10));
      }
      round->texts.push_back(store.get_to_str(key));
    }
    // Who comes late finds the texts of ranks that have given up.
    round->given = store.check({verdict});
  };
  const std::string error = state.line->ask(timeout + kInquest, talk);
  if (error.empty() && !round->given && static_cast<int64_t>(round->texts.size()) == state.size)
    return round->texts;
  raise_peer_error(state, state.roll(kind), turn, phase, timeout,
                   error.empty() && round->given ? "another rank has given up" : "", place);
}

void compare_signature(GroupState& state, const Call& call, Milliseconds timeout) {
  const std::lock_guard<std::mutex> lock(state.comparing);
  std::vector<int64_t> signature = call.signature();
  if (state.signatures.count(signature)) return;
  refuse_failed(state, call.phase(), timeout);
  const int64_t turn = state.comparisons++;
  std::string text;
  for (const int64_t number : call.numbers()) text += std::to_string(number) + " ";
  const std::string place = "the comparison of a new kind of call, " + call.text();
  const std::vector<std::string> texts =
      exchange_texts(state, "signature", turn, text, call.phase(), place, timeout);
  std::vector<int64_t> headers;
  for (const std::string& each : texts) {
    std::istringstream stream(each);
    for (int64_t number = 0; stream >> number;) headers.push_back(number);
  }
  // Plans and numbers of tokens are of one call, not of its kind.
  for (size_t i = 0; i < headers.size(); i += Call::kFields) {
    headers[i + static_cast<size_t>(Field::kPlan)] = 0;
    headers[i + static_cast<size_t>(Field::kTokens)] = -1;
  }
  call.compare(headers.data(), state.size, state.name);
  state.signatures.insert(std::move(signature));
}

}  // namespace transformer_plugin::expert_parallel
