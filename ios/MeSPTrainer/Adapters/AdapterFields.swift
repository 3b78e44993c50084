import Foundation
import MeSPFiles
import MeSPSentences

/// What an adapter_config.json may hold: exporter/mesp/adapters/fields.json, whose text says what its parts are, and why keys are ignored.
/// `tests/adapters/test_config.py` holds the copy here equal to it.
struct AdapterFields: Decodable {
    let used: Set<String>
    let ignored: Set<String>
    let required: [String: Set<JSONValue>]

    /// Of PEFT's configuration, of mlx-lm's, and of the `lora_parameters` in that.
    struct Tables: Decodable {
        let peft, mlx, loraParameters: AdapterFields
    }

    static func all() throws -> Tables { try JSONDecoder.snakeCase.decode(Tables.self, from: Data(json.utf8)) }

    /// Throws `MeSPError` that names a key whose value means what the trainer does not do.
    func check(_ config: [String: JSONValue]) throws {
        let found = config.sorted { $0.key < $1.key }.first { key, value in
            !used.contains(key) && !ignored.contains(key) && !(required[key] ?? [.null]).contains(value)
        }
        guard let (key, value) = found else { return }
        throw AdapterFormat.unsupported(value.string.map { "\(key) \"\($0)\"" } ?? key)
    }

    private static let json = #"""
        {
          "peft": {
            "used": [
              "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
              "exclude_modules", "layers_to_transform", "target_parameters"
            ],
            "ignored": [
              "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying",
              "eva_config", "fan_in_fan_out", "inference_mode", "loftq_config", "lora_dropout",
              "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
              "runtime_config"
            ],
            "required": {
              "alora_invocation_tokens": [null],
              "arrow_config": [null],
              "bias": [null, "none"],
              "init_lora_weights": [null, true, false, "gaussian", "eva", "orthogonal", "mica"],
              "kasa_config": [null],
              "layer_replication": [null, []],
              "layers_pattern": [null, [], "", "layers", ["layers"]],
              "lora_bias": [null, false],
              "megatron_config": [null],
              "modules_to_save": [null, []],
              "monteclora_config": [null],
              "peft_type": ["LORA"],
              "task_type": [null, "CAUSAL_LM"],
              "trainable_token_indices": [null],
              "use_bdlora": [null],
              "use_dora": [null, false],
              "use_qalora": [null, false],
              "velora_config": [null]
            }
          },
          "mlx": {
            "used": ["lora_parameters", "num_layers"],
            "ignored": [
              "adapter_path", "batch_size", "clear_cache_threshold", "config", "data",
              "grad_accumulation_steps", "grad_checkpoint", "hf_dataset", "iters", "learning_rate",
              "lr_schedule", "mask_prompt", "max_seq_length", "model", "optimizer", "optimizer_config",
              "project_name", "report_to", "resume_adapter_file", "save_every", "seed", "steps_per_eval",
              "steps_per_report", "test", "test_batches", "train", "trust_remote_code", "val_batches",
              "wandb"
            ],
            "required": {
              "fine_tune_type": [null, "lora"]
            }
          },
          "lora_parameters": {
            "used": ["rank", "scale", "keys"],
            "ignored": ["dropout"],
            "required": {}
          }
        }
        """#
}
