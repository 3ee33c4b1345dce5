// The watchdog: a thread that observes the streams of this process's groups through their progress pages
// (progress.h) and ends the process when a collective exceeds its timeout. It makes no CUDA call, so CUDA
// cannot block it.
#ifdef TRANSFORMER_PLUGIN_CUDA
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <thread>

#include "distributed/process_group_state.h"

namespace transformer_plugin::distributed {
namespace {

constexpr Milliseconds kPollInterval{200};

// One kind of wait of one group, as the watchdog has last seen it. Times are in ms of the steady clock.
struct WaitStatus {
  int64_t sequence = 0;
  int64_t begin_ms = 0;
  int64_t last_heartbeat_ms = 0;
  bool has_report = false;  // another rank has written a liveness report
  std::shared_ptr<Heartbeat> heartbeat;
};

struct WatchedGroup {
  std::weak_ptr<ProcessGroupState> state;
  WaitStatus gpu;
  WaitStatus host;
};

[[noreturn]] void end_process(const std::string& text) {
  const std::string line = text + "\n";
  // Not through stdio: another thread may hold its lock for ever.
  if (write(STDERR_FILENO, line.data(), line.size()) < 0) _exit(1);
  _exit(1);
}

// Sends heartbeats once the wait has taken half a second; ends the process after the timeout.
void check_wait(ProcessGroupState& state, WaitStatus& status, const char* kind, int64_t sequence,
                int64_t begin_ms, const Phase& phase, int32_t label) {
  if (!status.heartbeat) {
    status.heartbeat = std::make_shared<Heartbeat>(state.heartbeat(kind));
  }
  const int64_t now = steady_now_ms();
  const int64_t first_call_end = state.first_call_end_ms.load();
  begin_ms = std::max(begin_ms, first_call_end);
  const Milliseconds timeout(first_call_end ? state.timeout_ms.load()
                                            : std::max(kFirstCallMs, state.timeout_ms.load()));
  if (status.has_report || now - begin_ms >= timeout.count()) {
    const LivenessReport report = status.heartbeat->find_missing_ranks(sequence, phase_text(phase));
    const std::string about = state.label(label);
    end_process(peer_error(phase, state.name, state.rank, state.size, timeout, report,
                           std::string(kind) == "gpu" ? "the collective did not end on the GPU"
                                                      : "the call into NCCL did not return") +
                (about.empty() ? "" : " " + about));
  }
  if (now - begin_ms >= kHeartbeatInterval.count() &&
      now - status.last_heartbeat_ms >= kHeartbeatInterval.count()) {
    status.last_heartbeat_ms = now;
    status.has_report = status.heartbeat->send(sequence, phase_text(phase));
  }
}

// The stream: is a collective running on the GPU?
void check_gpu(ProcessGroupState& state, WaitStatus& status) {
  const ProgressPage* page = state.page.load();
  if (!page) return;
  const int64_t ended = page->ended;
  const int64_t begun = page->begun;
  if (begun <= ended) {
    status.sequence = 0;
    return;
  }
  if (status.sequence != begun) {
    status.sequence = begun;
    status.begin_ms = steady_now_ms();
  }
  check_wait(state, status, "gpu", begun, status.begin_ms, find_phase(page->phase_id), page->label);
}

// The host: is a thread inside a call of NCCL?
void check_host(ProcessGroupState& state, WaitStatus& status) {
  const int64_t begin_ms = state.host_begin_ms.load();
  if (begin_ms == 0) return;
  check_wait(state, status, "host", state.host_sequence.load(), begin_ms,
             find_phase(state.host_phase_id.load()), state.host_label.load());
}

// Joined at exit. A forked child has no such thread and starts one when it needs it.
class Watchdog {
 public:
  void add(const std::shared_ptr<ProcessGroupState>& state) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const WatchedGroup& watched : groups_) {
      if (watched.state.lock() == state) return;
    }
    groups_.push_back({state, {}, {}});
    if (thread_.joinable()) return;
    thread_ = std::thread([this] { run(); });
  }

  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  // At exit the watchdog waits for collectives that are still running, within their timeout: without it, a
  // process that cannot shut its GPU down would hang.
  bool is_collective_running() const {
    for (const WatchedGroup& watched : groups_) {
      const std::shared_ptr<ProcessGroupState> state = watched.state.lock();
      const ProgressPage* page = state ? state->page.load() : nullptr;
      if (page && page->begun > page->ended) return true;
    }
    return false;
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_ || is_collective_running()) {
      std::erase_if(groups_, [](const WatchedGroup& watched) { return watched.state.expired(); });
      // The lock is released during the checks. Only this thread removes entries and other threads only
      // append, so index i stays valid.
      for (size_t i = 0; i < groups_.size(); ++i) {
        const std::shared_ptr<ProcessGroupState> state = groups_[i].state.lock();
        if (!state) continue;
        WatchedGroup copy = groups_[i];
        lock.unlock();
        check_gpu(*state, copy.gpu);
        check_host(*state, copy.host);
        lock.lock();
        groups_[i] = copy;
      }
      if (stopping_) {
        lock.unlock();
        std::this_thread::sleep_for(Milliseconds(10));
        lock.lock();
      } else {
        wake_.wait_for(lock, kPollInterval, [this] { return stopping_; });
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;
  std::vector<WatchedGroup> groups_;
  bool stopping_ = false;
};

Watchdog& watchdog() {
  static std::atomic<Watchdog*> current{nullptr};
  static std::atomic<pid_t> owner{0};
  static std::mutex creation_mutex;
  const std::lock_guard<std::mutex> lock(creation_mutex);
  if (owner.load() != getpid()) {
    current.store(new Watchdog);  // never freed; a forked child does not touch its parent's
    owner.store(getpid());
    std::atexit([] {
      if (owner.load() == getpid()) current.load()->stop();
    });
  }
  return *current.load();
}

}  // namespace

void watch_group(const std::shared_ptr<ProcessGroupState>& state) { watchdog().add(state); }

const StreamProgress& group_progress(ProcessGroupState& state) {
  std::call_once(state.progress_once, [&] {
    state.progress = allocate_progress();
    state.page.store(state.progress.page);
  });
  return state.progress;
}

}  // namespace transformer_plugin::distributed
#endif
