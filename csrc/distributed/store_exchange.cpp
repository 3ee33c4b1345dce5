// Exchanges between ranks through the group's store: texts, and the signatures of calls. They use no device.
// CUDA calls compare their signatures this way, once for each new kind of call, because the host does not
// wait for the stream.
#include <c10/util/Exception.h>

#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "distributed/process_group_state.h"

namespace transformer_plugin::distributed {

std::vector<std::string> all_gather_texts(ProcessGroupState& state, const char* kind, int64_t sequence,
                                          const std::string& text, const Phase& phase,
                                          const std::string& waits_for, Milliseconds timeout) {
  struct Exchange {
    std::string prefix;
    std::string text;
    int64_t rank;
    int64_t size;
    int64_t end;
    std::vector<std::string> texts;
    bool has_report = false;
  };
  const std::string prefix = state.key_prefix() + kind + "/" + std::to_string(sequence) + "/";
  const int64_t end = steady_now_ms() + timeout.count();
  const auto exchange = std::make_shared<Exchange>(Exchange{prefix, text, state.rank, state.size, end, {}});
  const auto operation = [exchange, heartbeat = state.heartbeat(kind),
                          report_key = state.key_prefix() + kReportKey, sequence,
                          waits_for](c10d::Store& store) {
    store.set(exchange->prefix + std::to_string(exchange->rank), exchange->text);
    int64_t last_heartbeat = steady_now_ms();
    for (int64_t r = 0; r < exchange->size; ++r) {
      const std::string key = exchange->prefix + std::to_string(r);
      while (!store.check({key})) {
        const int64_t now = steady_now_ms();
        if (exchange->has_report || now >= exchange->end) return;
        if (now - last_heartbeat >= kHeartbeatInterval.count()) {
          last_heartbeat = now;
          exchange->has_report = heartbeat.send(store, sequence, waits_for);
        }
        std::this_thread::sleep_for(Milliseconds(10));
      }
      exchange->texts.push_back(store.get_to_str(key));
    }
    // A late rank finds the texts of ranks that have failed meanwhile.
    exchange->has_report = store.check({report_key});
  };
  const std::string error = state.store->request(timeout + kLivenessCheckDuration, operation);
  if (error.empty() && !exchange->has_report &&
      static_cast<int64_t>(exchange->texts.size()) == exchange->size)
    return exchange->texts;
  raise_peer_error(state, state.heartbeat(kind), sequence, phase, timeout,
                   error.empty() && exchange->has_report ? "another rank has given up" : "", waits_for);
}

void compare_signature(ProcessGroupState& state, const Call& call, Milliseconds timeout) {
  const std::lock_guard<std::mutex> lock(state.signature_mutex);
  std::vector<int64_t> signature = call.signature();
  if (state.signatures.count(signature)) return;
  check_not_failed(state, call.phase(), timeout);
  const int64_t sequence = state.signature_sequence++;
  std::string text;
  for (const int64_t number : call.header()) text += std::to_string(number) + " ";
  const std::string waits_for = "the comparison of a new kind of call, " + call.text();
  const std::vector<std::string> texts =
      all_gather_texts(state, "signature", sequence, text, call.phase(), waits_for, timeout);
  std::vector<int64_t> headers;
  for (const std::string& each : texts) {
    std::istringstream stream(each);
    for (int64_t number = 0; stream >> number;) headers.push_back(number);
  }
  call.compare_signatures(std::move(headers), state.size, state.name);
  state.signatures.insert(std::move(signature));
}

}  // namespace transformer_plugin::distributed
